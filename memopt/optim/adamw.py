"""AdamW in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from memopt.optim.adam_states import AdamStates
from memopt.originals import original

if TYPE_CHECKING:
    from torch.optim import AdamW as _Torchs
else:
    _Torchs = original(torch.optim, "AdamW")


class AdamW(AdamStates, _Torchs):
    """torch.optim.AdamW, its arguments and its results, with one pass over memory a step and no wait for the
    GPU, under a gradient scaler too. foreach, fused and capturable are accepted and change nothing: this step
    is always fused and may always be captured. As with torch's fused step, a parameter's version counter does
    not notice the update.

    state_bits: 8 keeps the two moments in 2.03 bytes a parameter instead of 8, of every parameter that has at
    least min_8bit_size elements; see state_dict() for how such states are exchanged. master_weights: fp16 and
    bf16 parameters have an fp32 copy, and fp32 states, that the step works on. stochastic_rounding: fp16 and
    bf16 parameters without such a copy are rounded up or down at random, so that small updates are not lost
    on the average; the same on every run.

    All four may be given in a param group, too. Raises ValueError as torch does, for differentiable=True, and
    for amsgrad=True with state_bits=8."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_bits: int = 32,
        min_8bit_size: int = 4096,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        self._own_defaults = {
            "state_bits": state_bits,
            "min_8bit_size": min_8bit_size,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
