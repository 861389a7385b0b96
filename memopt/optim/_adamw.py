"""AdamW in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from memopt._runtime.originals import original
from memopt.optim._adam_states import AdamStates

if TYPE_CHECKING:
    from torch.optim import AdamW as _Torchs
else:
    _Torchs = original(torch.optim, "AdamW")


class AdamW(AdamStates, _Torchs):
    """AdamW in one pass over memory, with torch.optim.AdamW's arguments and results.

    A step does not wait for the GPU, under a gradient scaler neither. foreach, fused and capturable are accepted and
    change nothing: this step is always fused and may always be captured. As with torch's fused step, a parameter's
    version counter does not notice the update. The options of memopt's own may be given in a param group, too.

    With the same inputs a step gives torch's numbers to within 6 roundings of their terms in the parameter's type
    (fp32: 4e-7, fp64: 7e-16), but for these:

    - A gradient beyond 1.8e19, whose square no fp32 holds, makes exp_avg_sq infinite, and its parameter (not one of
      fp64) stands still but for the decay, as torch's does from 5.8e20 on (betas[1] = 0.999).
    - fp16 and bf16 parameters have what fused=True gives, which rounds each number once a step; torch's loops round
      after each operation.
    - fp64 parameters with an fp32 tensor as lr: torch rounds 1 - lr * weight_decay and the step's size to fp32, this
      one to fp64: 1.2e-7 of the parameter and of its update.
    - exp_avg is infinite after an infinite gradient, torch's becomes NaN; the parameter is NaN with both.
    - Under a gradient scaler it is torch's fused step: fp16 gradients are taken, a skipped step leaves gradients
      scaled, and a skipped first one makes states of zeros on CUDA.
    - A parameter whose dtype changes needs its states loaded anew. Before that torch's steps take them or raise,
      depending on foreach and fused; this one takes fp32 states of fp16 and bf16 parameters and does else as torch's
      with foreach=None.

    With state_bits=8 a gradient that is infinite or NaN, or whose square no fp32 holds, changes its own parameter alone
    and leaves it no moments. A smaller one is what the 255 others of its block are measured by: from 1000 times theirs
    on it slows them for as long as exp_avg_sq remembers it, from 8000 times it costs them their first moments for some
    steps.

    Args:
        params: As torch.optim.AdamW's, like all that are not named here.
        state_bits: 8 keeps the two moments in 2.03 bytes a parameter instead of 8; see state_dict() for how such states
            are exchanged.
        min_8bit_size: The least number of elements of a parameter whose moments have 8 bits.
        master_weights: fp16 and bf16 parameters have an fp32 copy, and fp32 states, that the step works on.
        stochastic_rounding: fp16 and bf16 parameters without such a copy are rounded up or down at random, so that
            small updates are not lost on the average; the same on every run.

    Raises:
        ValueError: As torch's, for differentiable=True, and for amsgrad=True with state_bits=8.

    Example:
        >>> optimizer = memopt.optim.AdamW(model.parameters(), lr=3e-4, state_bits=8)
    """

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
