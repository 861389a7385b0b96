"""A small transformer whose saved activations are most of its step's memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.inputs(self.first(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outer(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class SmallGPT(nn.Module):
    """Tokens [batch, length] -> logits."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def sentences(batch: int, length: int = 64, seed: int = 0) -> torch.Tensor:
    """Tokens that are learned in a hundred steps: each is the one before by a fixed permutation, or at random."""
    random = torch.Generator().manual_seed(seed)
    following = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(CLASSES, (batch, length), generator=random)
    kept = torch.rand(batch, length, generator=random) < 0.9
    for n in range(1, length):
        tokens[:, n] = torch.where(kept[:, n], following[tokens[:, n - 1]], tokens[:, n])
    return tokens
