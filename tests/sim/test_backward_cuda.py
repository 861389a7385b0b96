"""memopt.backward under torch's own allocator: at every capacity, and with every cudaMalloc failing."""

from __future__ import annotations

from tests.helpers.backward_steps import Trial, assert_swept, fails_at_every, kept, sweep, trial  # noqa: F401

SIM = {"memory": "1GiB"}


def test_every_capacity_completes_or_names_the_least(trial: Trial) -> None:  # noqa: F811
    found = sweep(trial)
    kept("capacities_native", found)
    assert_swept(found)


def test_every_request_to_the_driver_may_fail(trial: Trial) -> None:  # noqa: F811
    assert fails_at_every(trial, "cudaMalloc", 3) >= 2
