"""Linear layers whose weight is sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SparseWeight(nn.Parameter):
    """A parameter in a sparse layout. torch's own cannot be deep-copied; pickled or saved, it becomes one of those."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseWeight:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(), self.requires_grad)
        copied: SparseWeight = memo[id(self)]
        return copied


class SparseLinear(nn.Linear):
    """nn.Linear with a weight in the COO layout: torch has the product with such a matrix, but not with a bias added in
    the same call."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(input, self.weight)
        return product if self.bias is None else product + self.bias
