"""SGD in one pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from memopt._runtime.originals import original
from memopt.optim._coded_states import CodedMomentum, count_steps
from memopt.optim._state_layout import like, wanted_bits, wants_master

if TYPE_CHECKING:
    from torch.optim import SGD as _Torchs
else:
    _Torchs = original(torch.optim, "SGD")


class SGD(CodedMomentum, _Torchs):
    """SGD in one pass over memory, with torch.optim.SGD's arguments and results.

    A step does not wait for the GPU, not even under a gradient scaler (except for the first step with dampening under a
    scaler, which must know whether it is skipped). foreach and fused are accepted and change nothing. Sparse gradients
    are left to torch's own step.

    With the same inputs a step gives torch's numbers to within 6 roundings of their terms in the parameter's type
    (fp32: 4e-7, fp64: 7e-16). The notes of memopt.optim.AdamW on gradient scalers and on parameters whose dtype changes
    apply here, too. Intermediate sums of fp16 parameters beyond 65504, which become infinite in torch, are computed in
    fp32. p.grad is only read, whereas torch's step with foreach=True and nesterov=True adds the momentum to it.

    A momentum of 8 bits is rounded up or down so that its mean is right. An element whose gradient is infinite or NaN
    affects only its own parameter, and its momentum becomes 0. A large momentum determines the scale of the 255 other
    elements of its block: below a 4000th of it they are 0 or that, right in the mean alone.

    Args:
        params: As torch.optim.SGD's, like all that are not named here.
        state_bits: 8 keeps the momentum in 1.02 bytes a parameter instead of 4; see state_dict() for how such states
            are exchanged. Parameters whose first gradient is sparse have it in their own type.
        min_8bit_size: The smallest number of elements of a parameter for a momentum of 8 bits.
        master_weights: As memopt.optim.AdamW's.
        stochastic_rounding: As memopt.optim.AdamW's.
        offload_gradients: As memopt.optim.AdamW's.
        offload_states: As memopt.optim.AdamW's, of momentum buffers and master weights.
        step_in_backward: As memopt.optim.AdamW's.

    Raises:
        ValueError: As torch's, for differentiable=True, for state_bits=8 without momentum, and for
            offload_gradients=True and step_in_backward=True as memopt.optim.AdamW.
        OSError: As memopt.optim.AdamW does, of a directory for states.

    Examples:
        >>> optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_bits: int = 32,
        min_8bit_size: int = 4096,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        offload_gradients: bool = False,
        offload_states: bool | str | os.PathLike[str] = False,
        step_in_backward: bool = False,
    ) -> None:
        self._own_defaults = {
            "state_bits": state_bits,
            "min_8bit_size": min_8bit_size,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "offload_gradients": offload_gradients,
            "offload_states": offload_states,
            "step_in_backward": step_in_backward,
        }
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    _is_sgd = True
    _like_p = ("master_param",)

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        wide = wants_master(p, group)
        if wide and self.state[p].get("master_param") is None:
            self.state[p]["master_param"] = like(p, torch.float32, p)
        dithered = group["stochastic_rounding"] and not wide and p.dtype in (torch.float16, torch.bfloat16)
        if dithered or (group["momentum"] and wanted_bits(p, group)):
            count_steps(p, self.state[p])
        if group["momentum"] == 0 or self.state[p].get("momentum_buffer") is not None:
            return False
        # From zeros the formula gives the gradient itself, as torch's first step does, unless it is damped.
        self._make(p, group, "momentum_buffer", torch.float32 if wide else p.dtype)
        return bool(group["dampening"] != 0)

    def _has_states(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] or group["master_weights"] or group["stochastic_rounding"])

    def _update_by_torch(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        momentum = group["momentum"] != 0
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        # torch's fused step takes buffers of all or of none.
        for begun in (False, True):
            which = [i for i, b in enumerate(buffers) if (b is not None) == begun]
            made = [buffers[i] for i in which]
            sgd(
                [params[i] for i in which],
                [grads[i] for i in which],
                made,
                has_sparse_grad=any(grads[i].is_sparse for i in which),
                foreach=None if found_inf is None else False,
                fused=None if found_inf is None else True,
                found_inf=found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            for i, buffer in zip(which, made, strict=True):
                if momentum:
                    self.state[params[i]]["momentum_buffer"] = buffer
