"""memopt.backward on the CPU: an out of memory at any operation of a step, and the gradients of the plain run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.pieces import step

SOAK = os.environ.get("MEMOPT_SOAK") == "1"

pytestmark = pytest.mark.usefixtures("one_thread")


class Failing(TorchDispatchMode):
    """The operation at a position, counted from 0, runs out of memory, once: of those that take memory."""

    def __init__(self, position: int = -1, error: Callable[[], Exception] = MemoryError) -> None:
        super().__init__()
        self.position, self.count, self.error, self.raised = position, 0, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.is_mutable:
            self.count += 1
            if self.count - 1 == self.position:
                self.raised += 1
                raise self.error()
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randint(4, (samples,), generator=generator)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Of the norm."""
    apart = sum((a.double() - b.double()).square().sum() for a, b in zip(one, other, strict=True))
    return float((apart / sum(b.double().square().sum() for b in other)).sqrt())


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Of models, and of what stands before: each out of memory has the collector run over it."""
    step._histories.clear()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("at_entry", [False, True])
def test_any_operation_may_run_out_of_memory(at_entry: bool) -> None:
    x, y = batch()
    plain = Net()
    for _ in range(1 + at_entry):
        expected_loss = F.cross_entropy(plain(x), y)
        expected_loss.backward()
    position = 0
    while True:
        model = Net()
        fn = lambda a, b: F.cross_entropy(model(a), b)  # noqa: B023, E731
        if at_entry:
            fn(x, y).backward()
        old = [p.grad for p in model.parameters()]
        model.calls.zero_()
        with Failing(position) as failing:
            random = torch.get_rng_state()
            loss = memopt.backward(fn, x, y, model=model)
        assert torch.equal(random, torch.get_rng_state())
        assert difference(grads(model), grads(plain)) < 1e-6
        assert abs(float(loss) - expected_loss.item()) < 1e-6 and not loss.requires_grad
        if at_entry:
            assert all(p.grad is grad for p, grad in zip(model.parameters(), old, strict=True))
        if not failing.raised:
            break
        position += 1 if SOAK else 4
    assert position > 40
