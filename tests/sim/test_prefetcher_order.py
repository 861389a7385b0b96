"""The order of copies and computation in memopt.data.Prefetcher, on a device that does its work as late as it may or,
on one stream, as early: a step reads its own batch, always. Each wait is needed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from prefetched_steps import (
    COUNT,
    CUDA,
    MADE,
    STEPS,
    Stream,
    in_pinned_memory_that_serves_again,
    numbers,
    small,
    wrong_after,
)

from memopt import _C, sim
from memopt.data import Prefetcher
from memopt.data._prefetch import batch_transport

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.mark.parametrize("make", MADE)
def test_each_step_reads_its_own_batch_whoever_is_ahead(make: str) -> None:
    for n in range(200 if SOAK else 1):
        choose = random.Random(SEED + n)
        for which in ("computation", "copies", "neither", "either"):
            depth, other = choose.randrange(1, 4), choose.random() < 0.5
            wrong = wrong_after(which, MADE[make], SEED + n, depth, other=other)
            assert wrong == 0, f"seed {SEED + n}: {which}, depth {depth}, other {other}"


# ---- each wait in turn ----------------------------------------------------------------------------------------------


def test_without_the_wait_at_its_arrival_a_batch_is_read_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_C, "copy_await", lambda *_: None)
    assert wrong_after("computation", numbers) > 0
    assert wrong_after("computation", small) > 0


def test_without_the_wait_for_home_a_copy_overwrites_what_is_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = torch.cuda.Stream().cuda_stream
    copy_batch = _C.copy_batch
    monkeypatch.setattr(_C, "copy_batch", lambda *given: copy_batch(*given[:-1], idle))
    assert wrong_after("copies", numbers) > 0


def test_without_the_wait_for_pinned_memory_a_batch_is_overwritten_by_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is ahead of the device by more batches than there is pinned memory for."""
    monkeypatch.setattr(_C, "copy_wait", lambda *_: True)
    monkeypatch.setattr(_C, "copy_over", lambda *_: True)
    assert wrong_after("neither", numbers) > 0


def test_without_a_hold_pinned_memory_is_given_again_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_transport.BatchMemory, "hold", lambda *_: None)
    assert wrong_after("neither", in_pinned_memory_that_serves_again) > 0
    assert wrong_after("neither", numbers) > 0


def test_without_record_stream_another_stream_reads_what_is_not_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    assert wrong_after("copies", numbers, other=True) > 0


class Knows:
    """Goes to a device by a method of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> Knows:
        return Knows(self.x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Knows:
        return Knows(self.x.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.x.record_stream(stream)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_what_moves_itself_is_in_order_too(fault: bool, other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is one for another stream alone: else it is all on one."""
    if fault:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
    aside = torch.cuda.Stream()
    user = aside if other else torch.cuda.current_stream()
    sim.lazy(True)
    computation = Stream(lambda: sim.progress(-1, user.cuda_stream if other else 1), user)
    it = iter(Prefetcher((Knows(numbers(step)) for step in range(STEPS)), CUDA))
    first = next(it)  # sent from the stream that is home
    computation.use = torch.cuda.current_stream()
    computation.step(first.x, numbers(0))
    for step in range(1, 3):
        with torch.cuda.stream(user):
            batch = next(it)
            computation.use = user
            computation.step(batch.x, numbers(step))
        del batch
    found = computation.wrong()
    sim.lazy(False)
    assert (found > 0) == (fault and other)


@pytest.mark.parametrize("fault", [False, True])
def test_a_batch_that_nobody_wanted_keeps_its_memory_until_it_is_there(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        monkeypatch.setattr(batch_transport._OnItsWay, "__del__", lambda _: None)
    source = torch.full((COUNT,), -5).pin_memory()
    seen = torch.zeros(COUNT, dtype=torch.int64).pin_memory()
    first = torch.zeros(COUNT, dtype=torch.int64, device=CUDA)
    del first
    torch.cuda.synchronize()
    sim.lazy(True)
    it = iter(Prefetcher(iter([numbers(0), numbers(1)]), CUDA))
    kept = next(it)
    it.close()
    others = [torch.empty(COUNT, dtype=torch.int64, device=CUDA) for _ in range(6)]
    for other in others:
        other.copy_(source, non_blocking=True)
    sim.progress(-1, 1)  # the computation first: up to its wait for the first batch, which comes,
    sim.progress(3, _C.copy_counts(0)["stream_in"])
    sim.progress(-1, 1)  # and as far as it may
    sim.progress()
    wrong = 0
    for other in others:
        seen.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
        wrong += not torch.equal(seen, source)
    sim.lazy(False)
    del kept
    assert (wrong > 0) == fault


def test_a_copy_has_begun_before_the_step_that_it_runs_beside() -> None:
    """When step k is given to the device, batch k + depth is on its way, and no later one."""
    begun: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            begun.append(step)
            yield numbers(step)

    for depth in (1, 2, 3):
        begun.clear()
        for step, _ in enumerate(Prefetcher(loader(), CUDA, depth)):
            assert begun == list(range(min(step + depth + 1, STEPS)))
