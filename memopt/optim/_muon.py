"""Muon: momentum in one pass, then torch's own matrix products, a parameter at a time.

A momentum of 8 bits is SGD's (kernels/sgd.cuh) with a dampening that is the momentum, which is torch's
lerp: buf = momentum * buf + (1 - momentum) * g. Its direction comes from the same pass: what zeros become with lr = -1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.optimizer import ParamsT

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.originals import original
from memopt.optim._coded_states import CodedMomentum, count_steps
from memopt.optim._scaled_step import ScaledStep
from memopt.optim._state_layout import FLOATS, like, wanted_bits

if TYPE_CHECKING:
    from torch.optim import Muon as _Torchs
else:
    _Torchs = original(torch.optim, "Muon")


class Muon(CodedMomentum, _Torchs):
    """Muon with torch.optim.Muon's arguments and results, and momentum in 8 bits.

    With state_bits=32 a step is torch's, bit for bit, on every device, type and layout. It takes the same memory
    besides: that of one parameter's orthogonalization. (For bf16 parameters with nesterov=False, torch's step leaves
    the momentum divided by its norm. So does this one; with state_bits=8 it stays what it should be.) Under a gradient
    scaler the host waits once a step, to know whether it is skipped, as it does with torch's.

    With state_bits=8 the direction that is orthogonalized comes, in bf16, from the pass that updates the momentum, so
    that a step takes 2 bytes an element of its largest parameter less. The momentum is rounded up or down so that its
    mean is right. As with torch's, a gradient that is infinite or NaN makes its whole parameter NaN; of the momentum of
    8 bits it makes 0 where it is, and leaves all else.

    Args:
        params: As torch.optim.Muon's, like all that are not named here: parameters of two dimensions.
        state_bits: 8 keeps the momentum in 1.02 bytes a parameter instead of 4 (bf16: 2); see state_dict() for how such
            states are exchanged.
        min_8bit_size: The smallest number of elements of a parameter for a momentum of 8 bits.
        offload_gradients: As memopt.optim.AdamW's.
        offload_states: As memopt.optim.AdamW's, of the momentum; a parameter of any size is stepped whole.
        step_in_backward: As memopt.optim.AdamW's.

    Raises:
        ValueError: As torch's, for parameters that do not have two dimensions (in add_param_group() too), for
            state_bits=8 with momentum=0, and for offload_gradients=True and step_in_backward=True as
            memopt.optim.AdamW.
        OSError: As memopt.optim.AdamW does, of a directory for states.
        RuntimeError: Sparse gradients or complex parameters (step(), before any parameter has changed).

    Examples:
        >>> hidden = [p for p in model.layers.parameters() if p.ndim == 2]
        >>> optimizer = memopt.optim.Muon(hidden, lr=0.02, state_bits=8)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        state_bits: int = 32,
        min_8bit_size: int = 4096,
        offload_gradients: bool = False,
        offload_states: bool | str | os.PathLike[str] = False,
        step_in_backward: bool = False,
    ) -> None:
        self._own_defaults = {
            "state_bits": state_bits,
            "min_8bit_size": min_8bit_size,
            "offload_gradients": offload_gradients,
            "offload_states": offload_states,
            "step_in_backward": step_in_backward,
        }
        super().__init__(
            params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        )

    _is_elementwise = False

    def _check_parameters(self, params: list[Tensor]) -> None:
        for p in params:
            if p.ndim != 2:
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}; give it to "
                    "memopt.optim.AdamW"
                )

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        assert p.grad is not None
        if wanted_bits(p, group):
            count_steps(p, self.state[p])
        self._make(p, group, "momentum_buffer", p.grad.dtype)
        return False

    def _check_gradient(self, grad: Tensor) -> None:
        if grad.is_complex():
            raise RuntimeError("Muon does not support complex parameters")
        if grad.is_sparse:
            raise RuntimeError("Muon does not support sparse gradients")

    def _update(self, scaling: ScaledStep | None) -> None:
        chosen = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in chosen:
            self._check_gradient(p.grad)
        self._check_states({p: self.state[p] for p, _ in chosen if p in self.state})
        if scaling is not None:
            if scaling.is_skipped():
                return
            scaling.found_inf = None  # no other turn of this step need wait for it
        with torch.no_grad():
            if any(self.state.get(p, {}).get("momentum_buffer") is None for p, _ in chosen):
                self._complete_all()
            for p, group in chosen:
                self._update_one(p, group, scaling)

    def _update_one(self, p: Tensor, group: dict[str, Any], scaling: ScaledStep | None) -> None:
        state, momentum, nesterov = self.state[p], group["momentum"], group["nesterov"]
        if "momentum_buffer_scale" in state:
            buffer = grad = self._direction(p, group, scaling)
            momentum, nesterov = 0.0, False  # it is there already: buffer := grad, which it is
        else:
            grad = p.grad if scaling is None else scaling.scaled([p], p.device)[0]
            assert grad is not None
            if state.get("momentum_buffer") is None:  # p is not plain
                state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
            buffer = state["momentum_buffer"]
        muon(
            [p],
            [grad],
            [buffer],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=group["ns_coefficients"],
            ns_steps=group["ns_steps"],
            eps=group["eps"],
            adjust_lr_fn=group["adjust_lr_fn"],
            has_complex=False,
        )

    def _direction(self, p: Tensor, group: dict[str, Any], scaling: ScaledStep | None) -> Tensor:
        """Update p's momentum of 8 bits; return the direction to orthogonalize, in bf16 as torch takes it."""
        direction = torch.zeros_like(p, dtype=torch.bfloat16, memory_format=torch.preserve_format)
        groups = [
            {
                "params": [direction],
                "lr": -1.0,
                "weight_decay": 0.0,
                "momentum": group["momentum"],
                "dampening": group["momentum"],
                "nesterov": group["nesterov"],
            }
        ]
        states = {direction: self.state[p]}
        plan = _C.UpdatePlan(states, groups, True)
        plan.collect(states, groups, True)
        assert p.grad is not None
        kind = p.grad.dtype
        grad = like(p, kind if kind in FLOATS and kind is not torch.float64 else torch.float32, p.grad)
        if not plan.add(0, grad):
            raise RuntimeError(
                f"the 8-bit momentum of a parameter of shape {tuple(p.shape)} on {p.device} is not in its order or on "
                "its device: load the optimizer's state again after moving or replacing parameters"
            )
        try:
            if p.is_cuda:
                kernels.prepare()
            (number,) = plan.devices()
            if scaling is None:
                plan.run(number)
            else:
                plan.run(number, scaling.factor(p.device), None, scaling.store)
                if scaling.store and grad is not p.grad:
                    scaling.keep(p, grad)
        finally:
            plan.drop()
        return direction
