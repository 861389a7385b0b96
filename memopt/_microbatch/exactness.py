"""Refusals where the micro-batches of a batch cannot have the gradients of the whole.

Decidable beforehand: modules that mix samples (batch norm), gradients that are changed on their way (hooks). By the
graph of a loss: torch's cross entropy says how many targets it has averaged over. By values: the loss of a batch must
be the weighted sum of the losses of unequal parts of it (check_loss). What holds for the batches that were tried by
chance (each with as many targets that count as the next) cannot be told from what holds always; so it is tried again,
at the first, second, fourth, eighth … step that is cut."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from memopt._microbatch.attempt import run_attempt
from memopt._microbatch.split_batch import SplitBatch, Weights
from memopt._runtime.log import logger, stacklevel
from memopt._runtime.state_snapshot import BufferValues, GradientTensors, Modes, RandomState
from memopt.optim._backward_steps import steps_at_once
from memopt.optim._offloaded_gradients import sends_to_host

_DEPTH = 64  # nodes of a loss's graph that are looked at, from its end: reductions are there

# By the loss's dtype: what a sum over other tiles may differ by, of the largest loss. TF32 and autocast inside fn do
# not show in the dtype, so fp32's is wide; a mean over tokens instead of samples is off by more as soon as lengths do.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}

_TOLD = "pass exact=False to run it in micro-batches anyway"
_ANOTHER = "Draw it outside of fn, or leave out exact=True: the gradients are then equal in distribution only"

Suspects = list[tuple[str, weakref.ref[nn.Module]]]


def suspects(modules: Sequence[nn.Module]) -> Suspects:
    """Modules that mix samples when they are in train mode, by name: the list is kept, the mode is asked each time."""
    found = []
    for root in modules:
        for name, module in root.named_modules():
            by_name = "BatchNorm" in type(module).__name__ and hasattr(module, "running_mean")
            if isinstance(module, _BatchNorm | _InstanceNorm) or by_name:
                found.append((name, weakref.ref(module)))
    return found


def _mixing(found: Suspects) -> Iterator[str]:
    """Describe what those modules, in their present mode, would do differently with micro-batches."""
    for name, reference in found:
        module = reference()
        if module is None:  # it is part of the model no more
            continue
        keeps = getattr(module, "running_mean", None) is not None
        if isinstance(module, _InstanceNorm):
            if module.training and keeps:
                yield f"{_module(name, module)} averages its running statistics over the batch"
        elif module.training or not keeps:
            yield f"{_module(name, module)} normalises by the batch's own statistics"


def refuse_mixing(found: Suspects) -> None:
    reasons = list(_mixing(found))
    if reasons:
        more = f" (and {len(reasons) - 1} more modules)" if len(reasons) > 1 else ""
        raise ValueError(
            "memopt.backward: in micro-batches, the batch would have other gradients than as a whole: "
            f"{reasons[0]}{more}. Put such modules into eval mode, use a norm over single samples (GroupNorm, "
            f"LayerNorm), or {_TOLD}: each micro-batch is then normalised by itself, and running statistics are "
            "updated once for each micro-batch"
        )


def refuse_steps(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that step in the backward pass: one that runs out of memory would have stepped some."""
    for parameter in parameters:
        if any(map(steps_at_once, (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())):
            raise ValueError(
                f"memopt.backward: a parameter of shape {tuple(parameter.shape)} steps as its gradient is made "
                "(step_in_backward=True), so a backward pass that runs out of memory could not be undone, nor one run "
                "in parts. Leave step_in_backward out, or take offload_gradients=True, or call loss.backward()"
            )


def refuse_hooks(modules: Sequence[nn.Module]) -> None:
    """Refuse hooks of parameters, which see the gradient of a micro-batch for that of the batch."""
    for root in modules:
        for name, parameter in root.named_parameters():
            later = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
            if parameter._backward_hooks or not all(map(sends_to_host, later)):
                raise ValueError(
                    f"memopt.backward: parameter {name} has a hook on its gradient, which would be called for each "
                    "micro-batch, with the gradient of that micro-batch alone. Do its work after backward(), or "
                    f"{_TOLD}"
                )


def refuse_random_modules(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that draw random numbers, under exact=True, before anything runs."""
    for drawing in _drawing(modules):
        raise ValueError(
            f"memopt.backward: exact=True is not possible, because {drawing} draws another mask for each micro-batch. "
            f"{_ANOTHER}"
        )


def refuse_randomness() -> None:
    """Refuse a fn that drew random numbers, under exact=True."""
    raise ValueError(
        "memopt.backward: exact=True is not possible, because fn draws random numbers, and micro-batches would draw "
        f"others. {_ANOTHER}"
    )


def warn_of_randomness(modules: Sequence[nn.Module]) -> None:
    """Warn that a batch is split although fn drew random numbers."""
    names = list(_drawing(modules))
    more = f" and {len(names) - 1} more modules" if len(names) > 1 else ""
    who = f"fn ({names[0]}{more})" if names else "fn"
    warnings.warn(
        f"memopt.backward: this batch did not fit and runs in micro-batches, and {who} draws random numbers. "
        "Micro-batches draw others than the whole batch would, so this step's loss and gradients equal those of the "
        "whole batch in distribution only. For equal ones, draw the noise outside of fn and pass it to "
        "memopt.backward with the batch; exact=True refuses such a fn, exact=False silences this warning",
        RuntimeWarning,
        stacklevel=stacklevel(),
    )


def _drawing(modules: Sequence[nn.Module]) -> Iterator[str]:
    for root in modules:
        for name, module in root.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                yield _module(name, module)


def _module(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


# ---- by the loss's graph ---------------------------------------------------------------------------------------------


def refuse_graph(loss: Tensor) -> None:
    """Refuse a cross entropy that has averaged over other numbers than those of samples. Waits for the device."""
    for node in _nodes(loss):
        counted = _counted(node)
        if counted is not None and counted[0] != counted[1]:
            raise ValueError(
                f"memopt.backward: the loss is a mean over {counted[0]:g} of {counted[1]} targets ({counted[2]}), and "
                "the means of its micro-batches do not add up to that of the whole. Give the weight of each "
                "micro-batch, for example reduction=lambda *part: (part[1] != -100).sum(), or return the losses "
                f"unreduced (reduction='none'), or {_TOLD}"
            )


def _nodes(loss: Tensor) -> Iterator[Any]:
    left, seen = [loss.grad_fn], 0
    while left and seen < _DEPTH:
        node = left.pop(0)
        if node is None:
            continue
        seen += 1
        yield node
        left += [following for following, _ in node.next_functions]


def _counted(node: Any) -> tuple[float, int, str] | None:
    """Return the divisor of a mean of negative log likelihoods, its number of targets, and why the two may differ."""
    if not type(node).__name__.startswith("NllLoss") or getattr(node, "_saved_reduction", 0) != 1:
        return None
    total, target = node._saved_total_weight, node._saved_target
    if total.device.type == "meta" or total.numel() != 1:
        return None
    ignored = node._saved_ignore_index  # autograd's attribute is unsigned
    ignored -= 1 << 64 if ignored >= 1 << 63 else 0
    why = "class weights" if node._saved_weight is not None else f"ignore_index={ignored}"
    return float(total), target.numel(), why


# ---- by values -------------------------------------------------------------------------------------------------------


def is_due(steps: int) -> bool:
    """True at the first, second, fourth, eighth … step, by how many came before."""
    return (steps + 1) & steps == 0


def is_compiled(modules: Sequence[nn.Module], fn: Any) -> bool:
    """Return whether code is compiled: another batch size is then compiled again, and permanently in another way."""
    found = [fn, *(module for root in modules for module in root.modules())]
    return any(
        hasattr(one, "_torchdynamo_orig_callable")
        or hasattr(one, "_orig_mod")
        or getattr(one, "_compiled_call_impl", None) is not None
        for one in found
    )


def check_loss(
    fn: Callable[..., Tensor],
    split: SplitBatch,
    weights: Weights,
    modules: Sequence[nn.Module],
    parameters: Sequence[Tensor],
    devices: Sequence[torch.device],
    saved: BufferValues,
    most: int,
) -> int:
    """Run fn on the first samples of a batch, and on unequal parts of those, and compare the losses.

    It runs without gradients, which takes least memory, and with them where it raises an exception without: a loss
    may itself take derivatives (a gradient penalty, a differential equation). Where it draws random numbers, it runs
    in eval mode, in which dropout draws none. Gradients, random states, buffers and modes are put back.

    Args:
        fn: The function of memopt.backward.
        split: Its arguments.
        weights: The weights of their samples.
        modules: The modules whose modes are put back.
        parameters: Those whose gradients are to stay as they are.
        devices: The devices whose random states count.
        saved: Copies of the buffers that fn may change.
        most: The number of samples, if so many fit.

    Returns:
        The number of samples that were compared, 0 if none could be.

    Raises:
        ValueError: The losses of the parts do not add up.
        NotOnParts: fn raises an exception on a part.
    """
    values = _PartLosses(fn, split, weights, devices)
    random = values.random
    modes, gradients = Modes(*modules), GradientTensors(parameters)
    gradients.clear()  # fn might add to them
    try:
        samples = values.of_most(most)
        if samples and random.was_drawn_from():
            modes.set_eval()
            random.restore()
            samples = values.of_most(samples, in_eval_mode=True)
            if random.was_drawn_from():
                samples = 0
        if not samples:
            logger.info(
                "memopt.backward could not check the loss: it is random, or nothing fits besides the gradients"
            )
            return 0
        whole, *parts = values.values
        if not add_up(whole, parts):
            if values.of_most(samples) == samples and not add_up(whole, values.values[:1]):
                logger.info("memopt.backward could not check the loss: it differs from run to run")
                return 0
            refuse_values(whole, parts, weights.reduction)
        return samples
    finally:
        modes.restore()
        gradients.restore()
        random.restore()
        saved.restore()
        torch.clear_autocast_cache()  # a weight that was cast without gradients would stay without


class _PartLosses:
    """Losses of the first samples of a batch, and of parts of those, weighted so that they should add up."""

    def __init__(
        self,
        fn: Callable[..., Tensor],
        split: SplitBatch,
        weights: Weights,
        devices: Sequence[torch.device],
    ) -> None:
        self.fn, self.split, self.weights, self.devices = fn, split, weights, devices
        self.random = RandomState(devices)
        self.with_gradients = False
        self.bounds = (0, 0)  # of the samples that fn was run on last
        self.values: list[Tensor] = []  # of all, and of each part

    def of_most(self, samples: int, in_eval_mode: bool = False) -> int:
        """Compute the losses of as many samples as fit.

        Returns 0 if there is no memory for two, or if fn does not run in eval mode.
        """
        while samples > 1:
            try:
                if run_attempt(lambda: self._compute(samples), self.devices) is None:  # noqa: B023
                    return samples
            except Exception as error:
                if not self.with_gradients:
                    self.with_gradients = True
                    self.random.restore()
                    continue
                if in_eval_mode:
                    logger.info("memopt.backward could not check the loss: in eval mode, fn raises %r", error)
                    return 0
                raise not_on_parts(*self.bounds, self.split.samples, error) from error
            samples //= 2
        return 0

    def _compute(self, samples: int) -> None:
        ends = sorted(
            {max(1, samples // 4), samples - samples // 3, samples}
        )  # unequal, so that weights matter
        with torch.set_grad_enabled(self.with_gradients):
            bounds = [(0, samples), *zip([0, *ends], ends, strict=False)]
            self.values = [self._weighted(*pair, samples) for pair in bounds]

    def _weighted(self, start: int, stop: int, samples: int) -> Tensor:
        self.bounds = (start, stop)
        weight = 1.0 if self.weights.reduction == "sum" else self.weights.count(start, stop)
        if not weight:
            return torch.zeros(())
        args, named = self.split.micro_batch(start, stop)
        loss = self.fn(*args, **named).detach()
        if loss.dim():  # for each sample: their sum is what adds up
            return loss.sum()
        return loss * (1.0 if self.weights.reduction == "sum" else weight / self.weights.count(0, samples))


def add_up(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether the weighted losses of parts add up to that of `whole`. Waits for the device."""
    values = [float(part) for part in parts]
    expected = float(whole)
    scale = max(abs(expected), *map(abs, values))
    tolerance = _TOLERANCE.get(whole.dtype, 2e-3)
    # A part without a mean of its own (nothing of it counts) is none of a mean over samples either.
    return not math.isfinite(expected) or abs(sum(values) - expected) <= tolerance * scale


def refuse_values(whole: Tensor, parts: Sequence[Tensor], reduction: object) -> None:
    """Raise ValueError if the losses of parts do not add up."""
    how = repr(reduction) if isinstance(reduction, str) else "of those counts"
    raise ValueError(
        f"memopt.backward: the loss is not a {how} over samples: it is {float(whole):.6g} for a batch, but the "
        f"weighted losses of its parts add up to {sum(map(float, parts)):.6g}. Is it a mean over something else "
        "(tokens, pairs)? Give the weight of each micro-batch, reduction=lambda *part: number, or return a loss for "
        f"each sample, or {_TOLD}"
    )


class NotOnParts(ValueError):
    """fn runs on a batch and not on a part of it."""


def not_on_parts(start: int, stop: int, samples: int, error: Exception) -> NotOnParts:
    """Return the error for a batch of so many samples; `error` is what fn raised on those from start to stop."""
    part = "a second time"
    if stop - start < samples:
        part = f"on a part of it, samples {start} to {stop} of {samples}"
    return NotOnParts(
        f"memopt.backward: a batch that runs out of memory cannot be split, because fn does not run {part} "
        f"({type(error).__name__}: {error}). Name an argument that every micro-batch needs whole in unbatched=, or "
        "give the dimension of its samples in batch_dim=. Samples that depend on each other, such as the nodes of a "
        "graph, cannot be split: use memopt.auto_checkpoint() to fit the whole, or pass smaller graphs. If fn only "
        f"refuses so few samples, {_TOLD}"
    )
