"""SGD in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from memopt._runtime.originals import original
from memopt.optim._one_pass import OnePass
from memopt.optim._state_layout import is_plain, like, one_step, wants_master

if TYPE_CHECKING:
    from torch.optim import SGD as _Torchs
else:
    _Torchs = original(torch.optim, "SGD")


class SGD(OnePass, _Torchs):
    """SGD in one pass over memory, with torch.optim.SGD's arguments and results.

    A step does not wait for the GPU, not even under a gradient scaler (except for the first step with dampening under a
    scaler, which must know whether it is skipped). foreach and fused are accepted and change nothing. Sparse gradients
    are left to torch's own step.

    With the same inputs a step gives torch's numbers to within 6 roundings of their terms in the parameter's type
    (fp32: 4e-7, fp64: 7e-16). The notes of memopt.optim.AdamW on gradient scalers and on parameters whose dtype changes
    apply here, too. Intermediate sums of fp16 parameters beyond 65504, which become infinite in torch, are computed in
    fp32. p.grad is only read, whereas torch's step with foreach=True and nesterov=True adds the momentum to it.

    Args:
        params: As torch.optim.SGD's, like all that are not named here.
        master_weights: As memopt.optim.AdamW's.
        stochastic_rounding: As memopt.optim.AdamW's.
        offload_gradients: As memopt.optim.AdamW's.
        offload_states: As memopt.optim.AdamW's, of momentum buffers and master weights.
        step_in_backward: As memopt.optim.AdamW's.

    Raises:
        ValueError: As torch's, for differentiable=True, and for offload_gradients=True and step_in_backward=True as
            memopt.optim.AdamW.

    Example:
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
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        offload_gradients: bool = False,
        offload_states: bool = False,
        step_in_backward: bool = False,
    ) -> None:
        self._own_defaults = {
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
    _like_p = ("momentum_buffer", "master_param")

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        wide = wants_master(p, group)
        if wide and self.state[p].get("master_param") is None:
            self.state[p]["master_param"] = like(p, torch.float32, p)
        if group["stochastic_rounding"] and not wide and p.dtype in (torch.float16, torch.bfloat16):
            self.state[p]["step"] = one_step(
                self.state[p].get("step", 0.0), p
            )  # of which the rounding is made
        if group["momentum"] == 0 or self.state[p].get("momentum_buffer") is not None:
            return False
        # From zeros the formula gives the gradient itself, as torch's first step does, unless it is damped.
        self.state[p]["momentum_buffer"] = like(p, torch.float32 if wide else p.dtype)
        return bool(group["dampening"] != 0)

    def _has_states(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] or group["master_weights"] or group["stochastic_rounding"])

    def _relay(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        buffer, master = state.get("momentum_buffer"), state.pop("master_param", None)
        wide = wants_master(p, group)
        if isinstance(buffer, Tensor):
            if is_plain(p) and buffer.layout is torch.strided:
                state["momentum_buffer"] = like(p, torch.float32 if wide else p.dtype, buffer)
            else:
                state["momentum_buffer"] = buffer.to(dtype=p.dtype, device=p.device)
        if "step" in state:
            state["step"] = one_step(state["step"], p)
        if isinstance(master, Tensor) and wide:
            state["master_param"] = like(p, torch.float32, master)

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
