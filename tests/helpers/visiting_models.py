"""Models whose parameters visit the device by a plan: a GPT, a Llama, and small ones of the usual kinds of stages."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import memopt
from tests.helpers.budget_models import Skips
from tests.helpers.offloaded_models import Transformer


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = (one * cos + one.roll(one.shape[-1] // 2, -1) * sin for one in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class LlamaMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = LlamaAttention(width), LlamaMlp(width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        return x + self.mlp(self.before_mlp(x))


class Llama(nn.Module):
    """[batch, length] of words -> [batch, length, words]; untied, rotary positions."""

    def __init__(self, blocks: int = 8, width: int = 32, words: int = 24, length: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        angles = torch.arange(length)[:, None] * torch.logspace(0, -3, width // 4)[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        length = words.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class Functions(nn.Module):
    """A block whose forward uses its own parameters by functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(width))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(self.norm(x), self.weight).tanh()
        return x + self.scale * self.mlp(x)


class Shifted(nn.Module):
    """Blocks between parameters of the model's own."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return x * self.gain


class Sums(nn.Module):
    """Sums of far layers, and parameters of its own between them, in the model's own code."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * depth))
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for n, layer in enumerate(self.layers):
            x = F.gelu(layer(x) @ self.weight) + kept[n // 2]
            kept.append(x)
        return x


class Heavy(nn.Module):
    """A block like Light, whose parameters take much longer to come."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(width, width), nn.Parameter(torch.ones(rows, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x) + self.table[0])


class Light(Heavy):
    def __init__(self, width: int) -> None:
        super().__init__(width, 1)


class Regions(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.3)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(F.gelu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(memopt.checkpoint(self.inner, x, use_reentrant=False))


class Parts(nn.Module):
    """A block that calls parts of a container, which itself is never called; by a checkpointed region, if at all."""

    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(width, width), "down": nn.Linear(width, width)})
        self.checkpointed = checkpointed

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["down"](torch.tanh(self.inner["up"](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = memopt.checkpoint(self.inside, x, use_reentrant=False) if self.checkpointed else self.inside(x)
        return x + y


def small(kind: str, chance: random.Random) -> tuple[nn.Module, Callable[[int], torch.Tensor], int]:
    """A model, a maker of batches of so many rows, and the most rows."""
    width, depth = 8 * chance.randint(2, 4), chance.randint(2, 5)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, width)

    def images(count: int) -> torch.Tensor:
        return torch.randn(count, width, 6, 5)

    if kind == "linear":
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth)]
        return nn.Sequential(*layers), rows, chance.randint(60, 300)
    if kind == "functions":
        return Shifted([Functions(width) for _ in range(depth)], width), rows, chance.randint(60, 300)
    if kind == "sums":
        return Sums(width, depth), rows, chance.randint(60, 300)
    if kind == "skips":
        return Skips(width, depth), rows, chance.randint(60, 300)
    if kind == "convolutions":
        layers = [
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        ]
        return nn.Sequential(*layers), images, chance.randint(4, 12)
    words, length = chance.randint(20, 60), chance.randint(6, 12)

    def sentences(count: int) -> torch.Tensor:
        return torch.randint(words, (count, length))

    model = (
        Transformer(depth, width, words, length, tied=chance.random() < 0.5)
        if kind == "gpt"
        else Llama(depth, width, words, length)
    )
    return model, sentences, chance.randint(6, 24)


KINDS = ("linear", "functions", "skips", "sums", "convolutions", "gpt", "llama")
