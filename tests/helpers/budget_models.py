"""Small models whose steps hold what no stage by itself shows, and a training loop on them."""

from __future__ import annotations

import random
from collections.abc import Callable

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


class Training:
    """Steps of AdamW on a model; the loss takes a batch of any size."""

    def __init__(self, kind: str, seed: int, device: str) -> None:
        self.name = f"{kind}, seed {seed}"
        self.model, self.sample = (one.to(device) for one in make(kind, seed))
        self.target = torch.randn_like(self.sample)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=bool(seed % 2))
        self.device = device

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, self.target[: len(out)])

    def train(self) -> None:
        for _ in range(3):
            out = self.model(self.sample)
            value = self.loss(out)
            value.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def plan(self, budget: int, rows: int | None = None) -> None:
        memopt.auto_checkpoint(
            self.model, self.sample[:rows], memory_budget=budget, optimizer=self.optimizer, loss=self.loss
        )

    def least(self) -> int:
        try:
            self.plan(1)
        except InfeasibleBudget as error:
            return error.least_budget
        raise AssertionError("a budget of 1 byte is none")

    def is_kept(self, budget: int, most_in: Callable[[Callable[[], None]], int]) -> None:
        state = (t for s in self.optimizer.state.values() for t in s.values())
        standing = [*self.model.parameters(), *self.model.buffers(), self.sample, self.target, *state]
        there = sum(t.nbytes for t in standing) if self.device == "cpu" else 0
        most = most_in(self.train) + there
        assert most <= budget, f"{self.name}: {most} of {budget}"


def check(kind: str, seed: int, device: str, most_in: Callable[[Callable[[], None]], int]) -> None:
    """A named least budget and one above it are accepted and kept. most_in: the most that the device's allocator
    gives while a function runs, with all that was there before."""
    training = Training(kind, seed, device)
    least = training.least()
    for budget in (least, least + least // 8):
        training.plan(budget)
        training.is_kept(budget, most_in)


def check_larger(kind: str, seed: int, device: str, most_in: Callable[[Callable[[], None]], int]) -> None:
    """A batch larger than the planned one is planned in its first step, and keeps the budget."""
    training = Training(kind, seed, device)
    budget = training.least() * 9 // 8
    training.plan(budget, len(training.sample) // 3)
    training.train()  # the optimizer's state is made, and the batch planned for
    training.is_kept(budget, most_in)
    memopt.undo_checkpoint(training.model)
    training.plan(budget, len(training.sample) // 3)
    noted = torch.get_rng_state().nbytes if device == "cpu" else 0  # while it is planned for
    training.is_kept(budget + noted, most_in)
