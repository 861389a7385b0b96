"""auto_checkpoint's budget by torch.cuda.max_memory_allocated(), in a training loop on the simulated device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

from memopt._checkpoint.stages.costs import workspace_bytes
from tests.helpers import budget_models

SIM = {"memory": "1GiB"}
SEED = int(os.environ.get("MEMOPT_SEED") or random.randrange(1 << 30))


def most_in(function: Callable[[], None]) -> int:
    workspace_bytes(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_named_least_budget_is_accepted_and_kept(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check(kind, SEED, "cuda", most_in)


@pytest.mark.parametrize("kind", budget_models.KINDS)
def test_a_larger_batch_keeps_the_budget_too(kind: str) -> None:
    print(f"MEMOPT_SEED={SEED}")
    budget_models.check_larger(kind, SEED, "cuda", most_in)
