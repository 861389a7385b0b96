"""The pattern of semi-structured sparsity: of each four neighbours in a row, two are zero."""

from __future__ import annotations

import torch
from torch.nn.utils import prune


class TwoOfFour(prune.BasePruningMethod):
    """Keeps the two largest magnitudes of each four along the last dimension, which must be a multiple of four: what
    NVIDIA's sparse tensor cores take (https://arxiv.org/abs/2104.08378, section 3)."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        a, b, c, d = t.abs().mul_(default_mask).reshape(-1, 4).unbind(1)
        # Each pair is compared once; who wins twice stays. Of equals the first wins, on every device.
        ab, ac, ad, bc, bd, cd = (one.byte() for one in (a >= b, a >= c, a >= d, b >= c, b >= d, c >= d))
        wins = torch.stack([ab + ac + ad, 1 - ab + bc + bd, 2 - ac - bc + cd, 3 - ad - bd - cd], dim=1)
        return (wins >= 2).to(default_mask.dtype).reshape(t.shape)
