"""The order of copies and computation in memopt.data.Prefetcher under memopt's allocator, which gives a batch's memory
to others the moment it is free. (More faults: test_prefetcher_order.py.)"""

from __future__ import annotations

import os
import random

import pytest
import torch
from prefetched_steps import MADE, numbers, wrong_after

import memopt
from memopt import _C

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


@pytest.mark.parametrize("make", MADE)
def test_each_step_reads_its_own_batch_whoever_is_ahead(make: str) -> None:
    for n in range(200 if SOAK else 1):
        choose = random.Random(SEED + n)
        for which in ("computation", "copies", "neither", "either"):
            depth, other = choose.randrange(1, 4), choose.random() < 0.5
            wrong = wrong_after(which, MADE[make], SEED + n, depth, other=other)
            assert wrong == 0, f"seed {SEED + n}: {which}, depth {depth}, other {other}"


def test_without_the_waits_it_is_wrong_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "copy_await", lambda *_: None)
    assert wrong_after("computation", numbers) > 0
