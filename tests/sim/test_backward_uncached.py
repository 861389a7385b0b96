"""memopt.backward where each allocation is one call of the driver, each of which fails once."""

from __future__ import annotations

from tests.helpers.backward_steps import SOAK, Trial, fails_at_every, kept, trial  # noqa: F401

SIM = {"memory": "1GiB"}
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_every_allocation_may_fail(trial: Trial) -> None:  # noqa: F811
    allocations = fails_at_every(trial, "cudaMalloc", 1, stride=1 if SOAK else 3)
    kept("every_allocation", {"allocations, each failed once": allocations})
    assert allocations > 40
