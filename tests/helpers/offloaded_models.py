"""Models of the tests of offload_layers: a small transformer with tied weights, and what is rare in one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class Transformer(nn.Module):
    """[batch, length] of words -> [batch, length, words]."""

    def __init__(
        self,
        blocks: int = 2,
        width: int = 32,
        words: int = 24,
        length: int = 8,
        *,
        tied: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embedding.weight

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position
        return self.scale * self.head(self.norm(self.body(x)))


def words_of(model: Transformer, batch: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = batch, model.position.shape[0]
    return torch.randint(model.embedding.num_embeddings, shape, generator=generator)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Of the next word."""
    out = model(words)
    return F.cross_entropy(out[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())
