"""Small models whose steps hold what no stage by itself shows, and a training loop on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.chain import InfeasibleBudget


class Skips(nn.Module):
    """As a U-Net: what each stage on the way down made is an argument of one on the way up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.up = nn.ModuleList(Up(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x, kept.pop())
        return x


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat((x, skip), 1)).tanh()


class Convolved(nn.Module):
    """A ConvNeXt's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(out)))).permute(0, 3, 1, 2)


class Translates(nn.Module):
    """nn.Transformer, whose encoder's result is an argument of each of the decoder's layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.of = nn.Transformer(width, 2, depth, depth, 2 * width, 0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x, x)


def make(kind: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    width, depth = 8 * chance.randint(2, 5), chance.randint(2, 4)
    if kind == "skips":
        return Skips(width, depth), torch.randn(chance.randint(300, 900), width)
    if kind == "convolved":
        return nn.Sequential(*(Convolved(width) for _ in range(depth))), torch.randn(3, width, 17, 15)
    return Translates(width, depth), torch.randn(3, chance.randint(20, 50), width)


KINDS = ("skips", "convolved", "translates")


def check(kind: str, seed: int, device: str, most_in: Callable[[Callable[[], None]], int]) -> None:
    """A named least budget and one above it are accepted and kept. most_in: the most that the device's allocator
    gives while a function runs, with all that was there before."""
    model, sample = (one.to(device) for one in make(kind, seed))
    target = torch.randn_like(sample)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=bool(seed % 2))

    def loss(out: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, target)

    def train() -> None:
        for _ in range(3):
            out = model(sample)
            value = loss(out)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

    def plan(budget: int) -> None:
        memopt.auto_checkpoint(model, sample, memory_budget=budget, optimizer=optimizer, loss=loss)

    standing: list[Any] = [*model.parameters(), *model.buffers(), sample, target]
    try:
        plan(1)
    except InfeasibleBudget as error:
        least = error.least_budget
    for budget in (least, least + least // 8):
        plan(budget)
        there = sum(t.nbytes for t in (*standing, *(t for s in optimizer.state.values() for t in s.values())))
        most = most_in(train) + (there if device == "cpu" else 0)
        assert most <= budget, f"{kind}, seed {seed}: {most} of {budget}"
