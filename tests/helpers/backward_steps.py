"""Steps of memopt.backward on the simulated device beside the plain run's, for tests/sim/test_backward_*.py: one file
for each allocator."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt import sim
from memopt._microbatch import backward as step

SOAK = os.environ.get("MEMOPT_SOAK") == "1"
MIB = 1 << 20
MEMORY = 1 << 30
SAMPLES = 8


class Net(nn.Module):
    """(n, 256, 32) -> (n, 4): activations of some 2 MiB a sample, parameters of 0.3 MiB."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(32, 256),
            nn.GELU(),
            nn.LayerNorm(256),
            nn.Dropout(dropout),
            nn.Linear(256, 256),
            nn.GELU(),
        )
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


class Trial:
    """A model on the device, its batch, and the gradients that a plain step has."""

    def __init__(self) -> None:
        self.model = Net().cuda()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 256, 32, generator=generator).cuda()
        self.y = torch.randint(4, (SAMPLES,), generator=generator).cuda()
        self.calls: list[int] = []  # the samples of each call
        with sim.Compute():
            self.run_plain()
            self.expected = self.grads()
            self.loss = self.run_plain()
        self.forget()

    def fn(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return F.cross_entropy(self.model(x), y)

    def run_plain(self) -> float:
        self.model.zero_grad()
        loss = self.fn(self.x, self.y)
        loss.backward()
        return loss.item()

    def run(self, **named) -> float:
        self.calls.clear()
        with sim.Compute():
            return memopt.backward(self.fn, self.x, self.y, model=self.model, **named).item()

    def grads(self) -> list[torch.Tensor]:
        return [p.grad.cpu().double() for p in self.model.parameters()]

    def difference(self, times: int = 1) -> float:
        """Of the gradients to the plain ones, as a part of their norm."""
        apart = sum((a - times * b).square().sum() for a, b in zip(self.grads(), self.expected, strict=True))
        return float((apart / sum((times * b).square().sum() for b in self.expected)).sqrt())

    def forget(self) -> None:
        self.model.zero_grad()
        step._histories.clear()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def needed(self, samples: int) -> int:
        """Bytes of the device that a plain step takes which accumulates two batches of so many."""
        self.forget()
        sim.reset_peak()
        with sim.Compute():
            for _ in range(2):
                self.fn(self.x[:samples], self.y[:samples]).backward()
        torch.cuda.synchronize()
        peak = sim.stats()["bytes_peak"]
        self.forget()
        return peak


@pytest.fixture
def trial() -> Iterator[Trial]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Trial()
    yield made
    sim.fail_clear()
    sim.set_memory(MEMORY)
    made.forget()
    torch.set_num_threads(threads)


def fails_at_every(trial: Trial, function: str, times: int, stride: int = 1) -> int:
    """Lets call k of a driver function fail, for k = 0, 1, 2 … until a step makes fewer; returns how many did. What is
    tried again by the allocator fails `times` times."""
    k = 0
    while True:
        trial.forget()
        before = sim.calls(function)
        sim.fail(function, after=k, count=times)
        loss = trial.run()
        made = sim.calls(function) - before
        sim.fail_clear()
        if made <= k:
            return k
        assert trial.difference() < 1e-6, k
        assert abs(loss - trial.loss) < 1e-5
        k += stride


def capacities(trial: Trial) -> list[int]:
    """From what the whole batch takes down to below what one sample does."""
    most, least = trial.needed(SAMPLES), trial.needed(1)
    step = (most - least) // (60 if SOAK else 8)
    return list(range(most, least - 2 * step, -step))


def least_named(error: BaseException) -> int:
    found = re.search(r"\((\d+) bytes", str(error))
    assert found, str(error)
    return int(found[1])


def sweep(trial: Trial) -> dict[str, Any]:
    """A step at each capacity, once the first time and once as later epochs do."""
    completed, refused, ooms = [], [], []
    for capacity in capacities(trial):
        trial.forget()
        sim.set_memory(capacity)
        try:
            loss = trial.run()
        except torch.OutOfMemoryError as error:
            assert "even one sample (of" in str(error)
            assert least_named(error) > capacity
            assert all(p.grad is None for p in trial.model.parameters())
            refused.append(capacity)
            continue
        assert trial.difference() < 1e-6
        assert abs(loss - trial.loss) < 1e-5
        completed.append(capacity)
        # On a busy machine autograd's thread may let go of a step's last tensors when the next one has begun, which
        # takes that over the edge: once, since it learns from it.
        for _ in range(2):
            before = torch.cuda.memory_stats()["num_ooms"]
            for _ in range(3):
                trial.model.zero_grad()
                trial.run()
                assert trial.difference() < 1e-6
            later = torch.cuda.memory_stats()["num_ooms"] - before
            if not later:
                break
        ooms.append(later)
    sim.set_memory(MEMORY)
    return {
        "completed": completed,
        "refused": refused,
        "out of memory later": ooms,
        "one sample": trial.needed(1),
        "all": trial.needed(SAMPLES),
    }


def kept(name: str, found: dict[str, Any]) -> None:
    """The long form's figures."""
    if SOAK:
        figures = {"torch": torch.__version__, "samples": SAMPLES, **found}
        file = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / f"backward_{name}.json"
        file.write_text(json.dumps(figures, indent=1) + "\n")


def assert_swept(found: dict[str, Any]) -> None:
    """Every capacity that one sample can do with."""
    assert found["completed"] and found["refused"]
    assert max(found["refused"]) < found["one sample"]
    assert not any(found["out of memory later"])
