"""auto_checkpoint's budget, by the CPU's allocator, in a training loop."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memopt
from memopt._checkpoint.checked_plan import faster_within
from memopt._checkpoint.plan import StepOverhead
from memopt._checkpoint.stages.costs import CpuBytes
from memopt.chain import Chain, InfeasibleBudget, Stage, solve
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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_function_that_makes_the_optimizer_counts_as_the_optimizer(
    kind: type[torch.optim.Optimizer],
) -> None:
    peaks = []
    for made in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
        optimizer = kind(model.parameters()) if made else kind
        memopt.auto_checkpoint(model, torch.ones(2, 128), memory_budget="1GiB", optimizer=optimizer)
        model(torch.ones(4, 128)).sum().backward()  # for which it is planned anew
        peaks.append(model.plan.peak_bytes)
    assert peaks[0] == peaks[1]


def test_an_output_that_neither_stage_nor_loss_saves_is_gone_before_its_backward() -> None:
    sizes = {"body": (10, 4, 9.0), "head": (30, 8, 0.1), "loss": (20, 0, 0.1)}  # saved, output; seconds
    stages = (Stage(saved, output, time, 1.0, name=name) for name, (saved, output, time) in sizes.items())
    schedule = solve(Chain(tuple(stages), input_bytes=4), 50)
    assert schedule.ops[1:4] == (("fck", 1), ("fall", 2), ("bwd", 2))  # the head, the loss and its backward
    held, gone = (StepOverhead([0] * 3, [4, 8, 0], [10, 30, 20], 0, 0, dies=dies) for dies in (False, True))
    less = [
        before - after for before, after in zip(held.during(schedule), gone.during(schedule), strict=True)
    ]
    assert less == [8 if op == ("bwd", 2) else 0 for op in schedule.ops]


@pytest.mark.parametrize("first", [70, 85, 96.9])
@pytest.mark.parametrize("slope", [0.7, 1.0, 1.5])
def test_a_plan_that_leaves_room_is_given_more_until_it_uses_it(first: float, slope: float) -> None:
    """Steps take less than was foretold, and grow with the room as no solver knows."""

    def candidate(room: int) -> Any:
        taken = int(first + slope * (room - 100))
        schedule = SimpleNamespace(seconds=1000 - room, ops=room)
        return SimpleNamespace(
            predicted_bytes=room, peak_bytes=taken, schedule=schedule, keeps_all=False
        ), room

    tested: list[int] = []

    def taken_by(one: Any) -> int:
        tested.append(one[1])
        return int(one[0].peak_bytes)

    found: Any = faster_within(candidate(100), 100, None, 100, candidate, taken_by)
    assert 97 <= found[0].peak_bytes <= 100 and len(tested) == len({*tested})


def test_no_schedule_is_tested_twice() -> None:
    """One leaves room, the next takes too much, and there is none between them."""
    small, large = (
        SimpleNamespace(
            predicted_bytes=99,
            peak_bytes=peak,
            keeps_all=False,
            schedule=SimpleNamespace(seconds=time, ops=peak),
        )
        for peak, time in ((80, 2.0), (110, 1.0))
    )
    tested: list[Any] = []

    def taken_by(one: Any) -> int:
        tested.append(one[0])
        return 110

    found: Any = (small, 0)
    assert faster_within(found, 100, None, 100, lambda _: (large, 0), taken_by) is found  # type: ignore[arg-type, return-value]
    assert tested == [large]


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_more_room_is_of_no_use_where_it_saves_no_time(seconds: float) -> None:
    plan = SimpleNamespace(
        predicted_bytes=99, peak_bytes=90, schedule=SimpleNamespace(seconds=1.0), keeps_all=False
    )
    other = SimpleNamespace(schedule=SimpleNamespace(seconds=seconds, ops=1)), 0
    found: Any = (plan, 0)

    def refused(_: Any) -> int:
        raise AssertionError("steps by it were taken")

    assert faster_within(found, 100, None, 100, lambda _: other, refused) is found  # type: ignore[arg-type, return-value]
