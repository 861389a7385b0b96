"""torch.amp.GradScaler with one pass over the gradients, and with options that its users have asked for.

A subclass: what torch's does in Python (stages, errors, state_dict, pickling) is inherited, and its private methods,
which frameworks call and replace, keep their names and meanings. Ours are those that touch gradients.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.originals import original
from memopt.amp._clip import clip_grad_norm_, count_as_written, device_of, has_fast_norm, refuse_nonfinite
from memopt.amp._scaling import torchs_gradients, torchs_pass, update_scale_
from memopt.optim._offloaded_gradients import any_offloaded, multiply, norms_of
from memopt.optim._one_pass import OnePass
from memopt.optim._scaled_step import ScaledStep

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler as _Torchs
    from torch.distributed import ProcessGroup
else:
    _Torchs = original(torch.amp, "GradScaler")

__all__ = ["GradScaler"]

_PerDevice = dict[torch.device, "Tensor"]


@dataclass(frozen=True)
class _Options:
    """Constructor options beyond torch.amp.GradScaler's."""

    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    allow_fp16: bool
    no_gradients: str
    repair: bool
    process_group: ProcessGroup | str | None

    def __post_init__(self) -> None:
        if self.min_scale is not None and not self.min_scale > 0:
            raise ValueError(f"min_scale={self.min_scale}: expected a positive number")
        if self.max_scale is not None and not self.max_scale >= (self.min_scale or 0):
            raise ValueError(f"max_scale={self.max_scale}: expected at least min_scale, {self.min_scale}")
        if self.hysteresis < 1:
            raise ValueError(
                f"hysteresis={self.hysteresis}: expected at least 1, with which each inf backs the scale off"
            )
        if self.no_gradients not in ("error", "finite"):
            raise ValueError(f"no_gradients={self.no_gradients!r}: expected 'error' or 'finite'")


class _Stepped(NamedTuple):
    """The outcome of an optimizer's step."""

    found_inf: _PerDevice
    norm: Tensor | None


class GradScaler(_Torchs):
    """A gradient scaler that reads gradients once, as a drop-in for torch.amp.GradScaler.

    It gives the same results bit for bit, the same errors and the same state_dict, and is an instance of torch's class.
    It reads gradients once where torch reads them several times, and also works where torch merely lacks a kernel (bf16
    on CUDA).

    step(optimizer, max_norm=…) also clips. With memopt.optim's optimizers this takes one pass to read the gradients and
    the optimizer's own pass, without host synchronization. unscale_and_clip_() does the same for any optimizer;
    step_skipped() tells whether a step was skipped.

    Args:
        device: As torch's, like the next five.
        init_scale: The scale to begin with.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which the scale is multiplied after an inf.
        growth_interval: The number of consecutive iterations without an inf after which the scale grows.
        enabled: If False, every method calls the optimizer directly or does nothing.
        min_scale: The smallest scale that update() sets.
        max_scale: The largest scale that update() sets.
        hysteresis: The number of consecutive iterations with an inf after which the scale backs off.
        allow_fp16: Whether fp16 gradients are unscaled instead of refused.
        no_gradients: "finite": an optimizer without any gradient steps and counts as finite, instead of raising an
            error.
        repair: Whether to fix two faults of torch's scaler. The scale keeps a finite reciprocal (torch's scale can
            underflow, and then turns zero gradients into NaN that is not found), and it grows again after
            growth_interval was lowered below the tracker.
        process_group: The ranks that agree on found_inf, "world" for all, as with ShardedGradScaler: if one finds an
            inf, all skip the step. (For DTensor gradients the ranks agree without it.)

    Raises:
        ValueError: An option is out of range.

    Examples:
        >>> scaler = memopt.amp.GradScaler()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer, max_norm=1.0)
        >>> scaler.update()
    """

    _per_optimizer_states: dict[int, dict[str, Any]]

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        allow_fp16: bool = False,
        no_gradients: Literal["error", "finite"] = "error",
        repair: bool = False,
        process_group: ProcessGroup | Literal["world"] | None = None,
    ) -> None:
        options = _Options(min_scale, max_scale, hysteresis, allow_fp16, no_gradients, repair, process_group)
        if device == "cuda" and enabled and torch.cuda.amp.common.amp_definitely_not_available():
            # torch's own warning, but of our caller's line.
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2
            )
            enabled = False
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._options = options
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: Tensor | None = None  # made with the first update()
        self._stepped: dict[int, _Stepped] = {}  # by id(optimizer): since the last update()
        self._stepped_before: dict[int, _Stepped] = {}  # in the iteration that it ended

    # ---- passes over gradients -----------------------------------------------------------------------------------

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> _PerDevice:
        allow_fp16 = allow_fp16 or self._options.allow_fp16
        return self._pass_over(optimizer, inv_scale, found_inf, allow_fp16, store=True)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._is_replaced():
            found: dict[str, Any] = super()._check_inf_per_device(optimizer)
            return found
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inv_scale, found_inf = self._inverse(), _zero(scale.device)
        founds = self._pass_over(optimizer, inv_scale, found_inf, True, store=False)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = founds
        return founds

    def _is_replaced(self) -> bool:
        """Return whether a subclass or a framework has replaced our _unscale_grads_() by its own function."""
        current = getattr(self._unscale_grads_, "__func__", None)
        return current is not GradScaler._unscale_grads_

    def _inverse(self) -> Tensor:
        """Return 1 / scale, as unscale_() computes it: by way of fp64."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return scale.double().reciprocal().float()

    def _pass_over(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
        store: bool,
    ) -> _PerDevice:
        """Look for infs and, with store, multiply by inv_scale. Returns found_inf of each device with gradients."""
        parameters = _parameters(optimizer)
        gradients = _C.Gradients(parameters, of_parameters=True)
        if any_offloaded(gradients.others):
            return self._pass_over_offloaded(parameters, inv_scale, found_inf, allow_fp16, store)
        if gradients.others or (torch.float16 in gradients.dtypes and not allow_fp16):
            collected = torchs_gradients(parameters, allow_fp16)
            devices = list(dict.fromkeys(grad.device for grad in collected))
            gradients = _C.Gradients(collected)
        else:
            devices = [device_of(number) for number in gradients.devices]
        if self._options.repair:
            found_inf.masked_fill_(~inv_scale.isfinite(), 1.0)
        founds = {device: _on(device, found_inf) for device in devices}

        # torch's op goes first: what it refuses, it refuses before anything has changed. But where it is about to ask
        # other ranks what they have found, it should tell them what ours have.
        others = gradients.others
        later = any(hasattr(grad, "device_mesh") for grad in others)
        if not later:
            torchs_pass(others, founds, inv_scale if store else None)
        if gradients.devices:
            kernels.prepare()
        for number in gradients.devices:
            device = device_of(number)
            there = _on(device, inv_scale) if store else None
            gradients.run(number, store=store, inv_scale=there, found_inf=founds[device])
        if later:
            torchs_pass(others, founds, inv_scale if store else None)

        if not founds and self._options.no_gradients == "finite":
            founds = {found_inf.device: found_inf}
        return self._agree(founds)

    def _pass_over_offloaded(
        self, parameters: list[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool, store: bool
    ) -> _PerDevice:
        grads = [p.grad for p in parameters if p.grad is not None]
        if not allow_fp16 and any(grad.dtype is torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if self._options.repair:
            found_inf.masked_fill_(~inv_scale.isfinite(), 1.0)
        norms = norms_of(grads)
        found = _on(norms.device, found_inf)
        kernels.prepare()
        _C.Gradients([norms]).run(norms.get_device(), found_inf=found)  # as not finite as an element
        if store:
            multiply(grads, inv_scale)
        return self._agree({norms.device: found})

    def _agree(self, founds: _PerDevice) -> _PerDevice:
        """Let every rank of the process group know what any of them has found."""
        group = self._options.process_group
        if group is None:
            return founds
        scale, _ = self._check_scale_growth_tracker("unscale_")
        worst = _zero(scale.device)
        for found in founds.values():
            worst = torch.maximum(worst, found.to(scale.device, non_blocking=True))
        torch.distributed.all_reduce(
            worst, torch.distributed.ReduceOp.MAX, None if isinstance(group, str) else group
        )
        for found in founds.values():
            found.copy_(worst, non_blocking=True)
        return founds or {scale.device: worst}

    # ---- unscale and clip ----------------------------------------------------------------------------------------

    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip them by their norm.

        This is unscale_(optimizer) followed by clip_grad_norm_() of all its gradients, in one pass to read them and one
        to scale them. The second is skipped where the scale is 1 and the norm within max_norm. Gradients that
        memopt.amp.clip_grad_norm_ leaves to torch are left to torch here, too.

        Args:
            optimizer: The optimizer whose gradients are unscaled, all of them together.
            max_norm: The largest norm of the unscaled gradients after clipping.
            norm_type: The norm's order; inf for the largest magnitude.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN; only then does the host wait for the
                device.

        Returns:
            The norm of the unscaled gradients before clipping.

        Raises:
            RuntimeError: The gradients are unscaled already, or the norm is not finite with error_if_nonfinite.

        Examples:
            >>> norm = scaler.unscale_and_clip_(optimizer, 1.0)
            >>> scaler.step(optimizer)
        """
        norm_type = float(norm_type)
        if not self._enabled:
            return clip_grad_norm_(_parameters(optimizer), max_norm, norm_type, error_if_nonfinite)
        state = self._unscalable(optimizer)
        gradients = _C.Gradients(_parameters(optimizer), of_parameters=True)
        if (
            len(gradients.devices) != 1
            or not has_fast_norm(gradients, norm_type)
            or (torch.float16 in gradients.dtypes and not self._options.allow_fp16)
            or self._is_replaced()
        ):
            self.unscale_(optimizer)
            return clip_grad_norm_(_parameters(optimizer), max_norm, norm_type, error_if_nonfinite)

        inv_scale = self._inverse()
        factors, norm = self._measure(gradients, state, inv_scale, max_norm, norm_type)
        state["stage"] = OptState.UNSCALED
        ((device, factor),) = factors.items()
        (number,) = gradients.devices
        if error_if_nonfinite and not norm.isfinite():
            gradients.multiply(number, _on(device, inv_scale))
            refuse_nonfinite(norm, norm_type)
        gradients.multiply(number, factor)
        count_as_written(gradients, number)
        return norm

    def _unscalable(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state where unscale_() would do its work now; else raise its error."""
        self._check_scale_growth_tracker("unscale_")
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            self.unscale_(optimizer)  # raises
        return state

    def _measure(
        self,
        gradients: _C.Gradients,
        state: dict[str, Any],
        inv_scale: Tensor | None,
        max_norm: float,
        norm_type: float,
    ) -> tuple[_PerDevice, Tensor]:
        """Read gradients once, and return a factor for each device, which unscales and clips, and the norm.

        With inv_scale (else they are unscaled already) state is told what was found.
        """
        kernels.prepare()
        scale, _ = self._check_scale_growth_tracker("unscale_")
        maximum, max_norm = math.isinf(norm_type), float(max_norm)
        devices = [device_of(number) for number in gradients.devices]
        found_inf = _zero(scale.device)
        if inv_scale is not None and self._options.repair:
            found_inf.masked_fill_(~inv_scale.isfinite(), 1.0)
        founds = {device: _on(device, found_inf) for device in devices}
        norms = {device: _empty(device) for device in devices}
        factors = {device: _empty(device) for device in devices}
        for number, device in zip(gradients.devices, devices, strict=True):
            gradients.run(
                number,
                inv_scale=None if inv_scale is None else _on(device, inv_scale),
                found_inf=None if inv_scale is None else founds[device],
                norm=norms[device],
                factor=factors[device],
                max_norm=max_norm,
                maximum=maximum,
            )
        norm = norms[devices[0]]
        if len(devices) > 1:
            norm = torch.linalg.vector_norm(
                torch.stack([_on(devices[0], one) for one in norms.values()]), norm_type
            )
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            if inv_scale is not None:
                factor = factor * _on(devices[0], inv_scale)
            factors = {device: _on(device, factor) for device in devices}
        if inv_scale is not None:
            state["found_inf_per_device"] = self._agree(founds)
        return factors, norm

    # ---- step ----------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        unscaled_grads: bool = False,
        **kwargs: Any,
    ) -> float | None:
        """Step an optimizer unless an inf was found, like torch's step(); with max_norm, clip its gradients, too.

        Gradients are clipped as by unscale_and_clip_(), or as by clip_grad_norm_() if they were unscaled before;
        gradient_norm(optimizer) is their norm before clipping. With memopt.optim's optimizers, dense fp32, fp16 and
        bf16 gradients are only read: the optimizer's kernel unscales and clips them, and the host does not wait.
        param.grad then remains as it was, scaled and not clipped, unless unscaled_grads is set.

        Args:
            optimizer: The optimizer to step.
            *args: Passed to optimizer.step().
            max_norm: The largest norm of the unscaled gradients; None clips nothing.
            norm_type: The norm's order; inf for the largest magnitude.
            unscaled_grads: Whether to leave the gradients as the optimizer has used them, unscaled and clipped.
            **kwargs: Passed to optimizer.step().

        Returns:
            What optimizer.step() returns, None where it was skipped.

        Raises:
            RuntimeError: step() was already called since the last update(), or a closure is given, as with torch's.

        Examples:
            >>> scaler.step(optimizer, max_norm=1.0)
        """
        if not self._enabled:
            if max_norm is not None:
                clip_grad_norm_(_parameters(optimizer), max_norm, norm_type)
            unscaled: float | None = optimizer.step(*args, **kwargs)
            return unscaled
        norm, result = None, NotImplemented
        if max_norm is not None and "closure" not in kwargs and self._scale is not None:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is not OptState.STEPPED:
                clipping = float(max_norm), float(norm_type), unscaled_grads
                result, norm = self._step_or_clip(optimizer, state, clipping, *args, **kwargs)
        if result is NotImplemented:
            result = super().step(optimizer, *args, **kwargs)  # all of its errors
        state = self._per_optimizer_states[id(optimizer)]
        self._stepped[id(optimizer)] = _Stepped(state["found_inf_per_device"], norm)
        return result  # type: ignore[no-any-return]

    def _step_or_clip(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        clipping: tuple[float, float, bool],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Tensor]:
        """Have an optimizer of memopt.optim step, unscaling and clipping on its way; clip for any other.

        Returns NotImplemented as the result where the step is still to be taken, and the norm that the gradients had.
        """
        max_norm, norm_type, unscaled_grads = clipping
        ready = state["stage"] is OptState.READY
        norm = None

        def read(gradients: _C.Gradients | None) -> ScaledStep | None:
            nonlocal norm
            if gradients is None:
                gradients = _C.Gradients(_parameters(optimizer), of_parameters=True)
            if not gradients.devices or not has_fast_norm(gradients, norm_type):
                return None
            inv_scale = self._inverse() if ready else None
            factors, norm = self._measure(gradients, state, inv_scale, max_norm, norm_type)
            scale, _ = self._check_scale_growth_tracker("step")
            founds = [f.to(scale.device, non_blocking=True) for f in state["found_inf_per_device"].values()]
            found_inf = founds[0] if len(founds) == 1 else sum(founds)
            return ScaledStep(found_inf, scale if ready else None, factors, unscaled_grads)

        if (
            isinstance(optimizer, OnePass)
            and optimizer._step_supports_amp_scaling
            and getattr(optimizer, "grad_scale", None) is None
            and not self._is_replaced()
        ):
            result = optimizer._memopt_step(read, *args, **kwargs)
            if norm is not None:
                state["stage"] = OptState.STEPPED
                return result, norm
        if ready:
            return NotImplemented, self.unscale_and_clip_(optimizer, max_norm, norm_type)
        return NotImplemented, clip_grad_norm_(_parameters(optimizer), max_norm, norm_type)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Tell whether step(optimizer) was skipped because of an inf.

        Args:
            optimizer: An optimizer that stepped in this iteration or, after update(), in the iteration that update()
                ended.

        Returns:
            A tensor of one bool on the scale's device; the host waits only when it reads it.

        Raises:
            RuntimeError: step() was not called on it.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.bool)
        stepped = self._stepped_last(optimizer, "step_skipped()")
        scale, _ = self._check_scale_growth_tracker("step_skipped")
        total = _zero(scale.device)
        for found in stepped.found_inf.values():
            total = total + found.to(scale.device, non_blocking=True)
        return (total != 0).reshape(())

    def gradient_norm(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the norm that step(optimizer, max_norm=…) found, in this iteration or the one that update() ended.

        Args:
            optimizer: An optimizer whose last step clipped.

        Returns:
            A tensor of one fp32.

        Raises:
            RuntimeError: step() was not called on it, or without max_norm.
        """
        norm = self._stepped_last(optimizer, "gradient_norm()").norm
        if norm is None:
            raise RuntimeError("gradient_norm() needs a step that clips: call step(optimizer, max_norm=…)")
        return norm

    def _stepped_last(self, optimizer: torch.optim.Optimizer, asked: str) -> _Stepped:
        stepped = self._stepped.get(id(optimizer)) or self._stepped_before.get(id(optimizer))
        if stepped is None:
            raise RuntimeError(
                f"{asked}: step() was not called on this optimizer, in this iteration or the last"
            )
        return stepped

    # ---- update and state ------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, like torch's update(), subject to min_scale, max_scale, hysteresis and repair.

        Args:
            new_scale: The scale to set instead; the options are ignored then.
        """
        if not self._enabled:
            return
        founds = [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if new_scale is not None or not founds or self._scale is None:
            super().update(new_scale)
        else:
            self._update_by(founds)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._stepped, self._stepped_before = {}, self._stepped

    def _update_by(self, founds: list[Tensor]) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_inf, *rest = (found.to(scale.device, non_blocking=True) for found in founds)
        for found in rest:
            found_inf = found_inf + found  # not in place: step_skipped() may yet be asked
        options = self._options
        if options.hysteresis > 1 and self._hysteresis_tracker is None:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=scale.device
            )
        update_scale_(
            scale,
            growth_tracker,
            found_inf,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            min_scale=options.min_scale,
            max_scale=options.max_scale,
            hysteresis=options.hysteresis,
            hysteresis_tracker=self._hysteresis_tracker,
            repair=options.repair,
        )

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and, with hysteresis, `_hysteresis_tracker`, which torch's scaler ignores."""
        state: dict[str, Any] = super().state_dict()
        if self._enabled and self._options.hysteresis > 1:
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of torch's scaler or memopt's.

        Args:
            state_dict: What state_dict() returned.
        """
        super().load_state_dict(state_dict)
        if self._enabled:
            self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._options.hysteresis)
            if self._hysteresis_tracker is not None:
                self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_hysteresis_tracker"] = None
        state["_stepped"], state["_stepped_before"] = {}, {}
        return state


# ---- tensors -----------------------------------------------------------------------------------------------------


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    if len(groups) == 1 and type(groups[0]["params"]) is list:
        only: list[Tensor] = groups[0]["params"]
        return only
    return list(chain.from_iterable(group["params"] for group in groups))


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def _empty(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=device)
