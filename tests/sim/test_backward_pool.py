"""memopt.backward under memopt's allocator: at every capacity, and with every request to the driver failing."""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.helpers.backward_steps import Trial, assert_swept, fails_at_every, kept, sweep, trial  # noqa: F401

SIM = {"memory": "1GiB"}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def test_every_capacity_completes_or_names_the_least(trial: Trial) -> None:  # noqa: F811
    found = sweep(trial)
    kept("capacities_pool", found)
    assert_swept(found)


def test_every_request_to_the_driver_may_fail(trial: Trial) -> None:  # noqa: F811
    for function in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        assert fails_at_every(trial, function, 2) >= 2, function
