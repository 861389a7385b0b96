"""Adam in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from memopt.optim.adam_states import AdamStates
from memopt.originals import original

if TYPE_CHECKING:
    from torch.optim import Adam as _Torchs
else:
    _Torchs = original(torch.optim, "Adam")


class Adam(AdamStates, _Torchs):
    """torch.optim.Adam, its arguments and its results, as memopt.optim.AdamW is torch.optim.AdamW; the
    options are the same."""

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
