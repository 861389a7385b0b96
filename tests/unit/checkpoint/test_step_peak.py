"""The peaks of a planned model's own steps: plan.check(), and what follows a step above the budget."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt import _C
from memopt._checkpoint.stages.costs import CpuBytes

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 1024, 64


def make(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


def sample() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def planned(room: float = 1.1, **options: object) -> nn.Module:
    model = make()
    with pytest.raises(memopt.chain.InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, sample(), memory_budget=1, loss=loss, **options)
    budget = int(error.value.least_budget * room)
    return memopt.auto_checkpoint(model, sample(), memory_budget=budget, loss=loss, **options)


def step(model: nn.Module, beside: int = 0) -> None:
    """Take a step, with a tensor of so many bytes beside the model's."""
    out = model(sample())
    more = torch.empty(beside, dtype=torch.uint8)
    loss(out).backward()
    del more


def test_a_step_measures_as_the_trial_steps_did() -> None:
    model = planned()
    assert model.plan.check().measured_bytes is None and "no step yet" in str(model.plan.check())
    for _ in range(3):
        model.zero_grad()
        step(model)
    check = model.plan.check()
    assert check.measured_bytes is not None and check.within and "within the budget" in str(check)
    assert abs(check.measured_bytes - check.trial_bytes) <= check.trial_bytes // 50


def test_the_bytes_of_a_step_are_those_that_a_recording_sees() -> None:
    model = planned()
    step(model)
    measured = model.plan.check().measured_bytes
    model.zero_grad()
    with memopt.profile("cpu", modules=False) as recorded:
        step(model)
    live = recorded.peak_bytes - int(recorded.recording.live_bytes()[0])
    standing = sum(p.nbytes for p in model.parameters())  # the sample is made in the step
    assert abs(live + standing - measured) <= measured // 50


def test_a_step_leaves_the_peak_of_another_watch_alone() -> None:
    model = planned()
    watch = CpuBytes()
    watch.start()
    try:
        watch.restart()
        out = model(sample())
        more = torch.empty(1 << 28, dtype=torch.uint8)  # more than the backward pass takes
        del more
        loss(out).backward()
        assert watch.now_and_peak()[1] >= 1 << 28
    finally:
        watch.stop()
    assert model.plan.check().measured_bytes is None


def test_after_a_step_above_the_budget_the_model_is_planned_for_less() -> None:
    model, plain = planned(1.5), make()
    budget, plan = model.plan.memory_budget, model.plan
    beside = (budget - plan.check().trial_bytes) + (budget // 8)
    step(model, beside)
    assert not plan.check().within and "above the budget" in str(plan.check())
    for _ in range(2):
        model.zero_grad()
        step(model, beside)
        assert model.plan is not plan and model.plan.memory_budget == budget
        assert model.plan.check().within
    plain(sample()).square().mean().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_gradients_that_were_there_before_are_planned_with_after_a_step_above_the_budget() -> None:
    model = planned(1.3)
    step(model)
    first, second = model.plan, make()
    step(model)  # adds to gradients
    assert not first.check().within
    step(model)
    assert model.plan is not first and model.plan.check().within
    for _ in range(3):
        loss(second(sample())).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), second.parameters(), strict=True)
    )


def test_gradients_dropped_between_forward_and_backward_count_in_the_forward_alone() -> None:
    model = planned()
    step(model)
    plan = model.plan
    for _ in range(2):
        out = model(sample())
        model.zero_grad()
        loss(out).backward()
    assert model.plan is plan and plan.check().within


def test_strict_makes_an_error_of_a_step_above_the_budget_before_the_next_runs() -> None:
    model = planned(strict=True)
    step(model, model.plan.memory_budget)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"peak was above memory_budget: \d+ bytes, \d+ more.*Raise memory_budget to \d+"
    ):
        model(sample())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    memopt.undo_checkpoint(model)
    step(model)


def test_where_no_plan_takes_less_the_model_goes_on_with_one_warning() -> None:
    model = planned()
    plan = model.plan
    with pytest.warns(UserWarning, match="No plan takes that much less: raise memory_budget to") as warned:
        for n in range(3):
            model.zero_grad()
            step(model, plan.memory_budget + n)
    assert model.plan is plan and len(warned) == 1
    enough = int(str(warned[0].message).split()[-3])
    memopt.auto_checkpoint(model, sample(), memory_budget=enough, loss=loss)
    for _ in range(2):
        model.zero_grad()
        step(model, plan.memory_budget)
    assert model.plan.check().within
    memopt.auto_checkpoint(model, sample(), memory_budget=enough - (1 << 16), loss=loss)
    with pytest.warns(UserWarning, match="No plan takes that much less"):
        for _ in range(3):
            model.zero_grad()
            step(model, plan.memory_budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        step(model, plan.memory_budget)


def test_plans_are_replaced_twice_at_most() -> None:
    model = planned(4.0)
    plans = {model.plan}
    for n in range(6):  # each takes more than the one before
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(model, model.plan.memory_budget - model.plan.check().trial_bytes + (n + 1) * 1000)
        plans.add(model.plan)
    assert len(plans) == 3


def test_a_copy_of_the_model_goes_on_without_a_new_plan() -> None:
    model = copy.deepcopy(planned(1.5))
    plan = model.plan
    step(model, plan.memory_budget)
    step(model)
    assert model.plan is plan and not plan.check().within


def test_a_watch_ends_with_its_graph_and_for_whoever_else_watches() -> None:
    model = planned()
    out = model(sample())
    with memopt.profile("cpu", modules=False) as recorded:  # though the graph is alive
        torch.ones(1000)
    assert recorded.peak_bytes >= 4000
    loss(out).backward()
    assert model.plan.check().measured_bytes is None
    out = model(sample())
    del out
    number = _C.cpu_log_start(1, True)  # an error if it is still watched
    assert _C.cpu_log_stop(number) and not _C.cpu_log_stop(number)


def test_a_forward_pass_without_a_backward_pass_counts_nothing() -> None:
    model = planned()
    with torch.no_grad():
        model(sample())
    model(sample())
    assert model.plan.check().measured_bytes is None


def test_sparse_gradients_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), *(nn.Linear(8, 8) for _ in range(3)))
    tokens = torch.randint(0, 50, (4, 6))
    memopt.auto_checkpoint(model, tokens, memory_budget="1MiB", loss=loss)
    for _ in range(2):  # the second begins with them
        loss(model(tokens)).backward()
    assert model[0].weight.grad.is_sparse and model.plan.check().within
