"""Adam in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from memopt._runtime.originals import original
from memopt.optim._adam_states import AdamStates

if TYPE_CHECKING:
    from torch.optim import Adam as _Torchs
else:
    _Torchs = original(torch.optim, "Adam")


class Adam(AdamStates, _Torchs):
    """Adam in one pass over memory, with torch.optim.Adam's arguments and results.

    It is to torch.optim.Adam what memopt.optim.AdamW is to torch.optim.AdamW.

    Args:
        params: As torch.optim.Adam's, like all that are not named here.
        state_bits: As memopt.optim.AdamW's, like the next three.
        min_8bit_size: The least number of elements for states of 8 bits.
        master_weights: Keep an fp32 copy of fp16 and bf16 parameters.
        stochastic_rounding: Round fp16 and bf16 parameters at random.

    Raises:
        ValueError: As memopt.optim.AdamW does.

    Example:
        >>> optimizer = memopt.optim.Adam(model.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
