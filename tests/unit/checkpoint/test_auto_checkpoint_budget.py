"""auto_checkpoint's budget, by the CPU's allocator, in a training loop."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

import memopt
from memopt._checkpoint.stages.costs import CpuBytes
from memopt.chain import InfeasibleBudget
from memopt.optim._state_bytes import foretold
from tests.helpers import budget_models

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = int(os.environ.get("MEMOPT_SEED") or random.randrange(1 << 30))


def most_in(function: Callable[[], None]) -> int:
    allocator = CpuBytes()
    allocator.start()
    try:
        before, _ = allocator.restart()
        function()
        return allocator.now_and_peak()[1] - before
    finally:
        allocator.stop()


@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_named_least_budget_is_accepted_and_kept(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check(kind, SEED, "cpu", most_in)


@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_larger_batch_keeps_the_budget_too(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check_larger(kind, SEED, "cpu", most_in)


@pytest.mark.parametrize("foreach", [False, True])
def test_what_an_optimizers_step_takes_besides_counts(foreach: bool) -> None:
    parameters = [torch.ones(n, 64, requires_grad=True) for n in (8, 32, 32)]
    optimizer = torch.optim.AdamW(parameters, foreach=foreach)
    told = foretold(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected = (8 + 32 + 32 if foreach else 3 * 32) * 64 * 4  # a root, a quotient, and that of the one before
    assert expected <= sum(told.passing) <= 1.1 * expected
    assert expected <= most_in(optimizer.step) <= sum(told.passing)


def test_an_optimizers_step_that_takes_more_than_the_passes_is_named_with_the_remedy() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with pytest.raises(InfeasibleBudget, match=r"when the optimizer steps.*foreach=False"):
        memopt.auto_checkpoint(model, torch.ones(2, 128), memory_budget=1, optimizer=optimizer)
    assert "plan" not in model.__dict__
