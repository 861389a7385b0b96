"""auto_checkpoint's budget by torch.cuda.max_memory_allocated(), in a training loop on the simulated device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

import memopt
from memopt._checkpoint.stages.costs import workspace_bytes
from tests.helpers import budget_models

SIM = {"memory": "1GiB"}
SEED = int(os.environ.get("MEMOPT_SEED") or random.randrange(1 << 30))


def most_in(function: Callable[[], None]) -> int:
    workspace_bytes(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_named_least_budget_is_accepted_and_kept(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check(kind, SEED, "cuda", most_in)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_larger_batch_keeps_the_budget_too(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check_larger(kind, SEED, "cuda", most_in)


def test_a_step_above_the_budget_shows_in_torchs_statistics_and_is_planned_for_less() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8))
    )
    model.cuda()
    batch = torch.randn(1024, 64, device="cuda")
    plain = most_in(lambda: model(batch).sum().backward())
    model.zero_grad()
    memopt.auto_checkpoint(model, batch, memory_budget=int(plain * 0.9))
    plan = model.plan

    def step(beside: int = 0) -> None:
        workspace_bytes(torch.device("cuda"))  # else a step does not show them
        model.zero_grad()
        out = model(batch)
        more = torch.empty(beside, dtype=torch.uint8, device="cuda")
        out.sum().backward()
        del more

    torch.cuda.reset_peak_memory_stats()
    step()
    assert plan.check().within and plan.check().measured_bytes is not None
    above = plan.memory_budget - plan.check().trial_bytes + (64 << 10)
    step(above)
    assert not plan.check().within
    step(above)
    assert model.plan is not plan and model.plan.check().within
    torch.cuda.reset_peak_memory_stats()
    step(above)
    assert torch.cuda.max_memory_allocated() == model.plan.check().measured_bytes
