"""The pattern of semi-structured sparsity: of each four neighbours in a row, two are zero."""

from __future__ import annotations

import torch
from torch.nn.utils import prune


class TwoOfFour(prune.BasePruningMethod):
    """Keeps the two largest magnitudes of each four along the last dimension, which must be a multiple of four: what
    NVIDIA's sparse tensor cores take (https://arxiv.org/abs/2104.08378, section 3)."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        fours = (t.abs() * default_mask).reshape(-1, 4)
        smallest = torch.topk(fours, k=2, dim=1, largest=False, sorted=False).indices
        mask = torch.ones_like(fours, dtype=default_mask.dtype).scatter_(1, smallest, 0)
        return mask.reshape(t.shape)
