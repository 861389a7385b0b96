"""The residual block of the tests of checkpointing: a norm, a linear layer to four times the width and back."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """[..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.gelu(self.inner(self.norm(x))))


class Residual(nn.Module):
    """x + FeedForward(x), with dropout on the way."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.branch, self.dropout = FeedForward(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.branch(x))
