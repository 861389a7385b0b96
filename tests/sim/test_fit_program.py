"""memopt.fit() on the simulated device: plans with what offloads, held to their budgets and to what they promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memopt import sim
from memopt._fit import pricing
from memopt._fit.optimizers import step_seconds
from memopt._fit.planning import Planner
from memopt._fit.pricing import Prices
from memopt._fit.training_step import TrainingStep
from memopt._offload.schedule_sets import CodingSpeed
from memopt._run.plan import BF16, CODED_ACTIVATIONS, OFFLOAD_LAYERS
from tests.helpers import fit_models

SIM = {"memory": "1GiB"}
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # else its workspaces are larger than the models


@pytest.fixture(autouse=True)
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    # A simulated kernel's seconds say nothing of a device: as with one, the step on the host is the slower.
    monkeypatch.setattr(Prices, "step_seconds", lambda _, names: float(OFFLOAD_LAYERS in names))
    with sim.Compute():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4, 0.25])
@pytest.mark.parametrize("kind", ["gpt", "optimizer", "embedded", "long"])
def test_steps_by_the_plan_are_within_the_budget_and_as_its_tier_says(kind: str, share: float) -> None:
    fit_models.check(kind, share, "cuda")


def test_a_plan_in_bf16_takes_what_was_worked_out() -> None:
    one = fit_models.training("gpt", "cuda")
    plain = fit_models.peak_on_cuda(one.standing(), lambda: fit_models.plain(one))
    step = TrainingStep(one.model, one.optimizer, one.sample, one.loss, "mean", None)
    planner = Planner(step, plain - plain // 8, False, {BF16}, False)
    planner.levers = [BF16]
    planner.micro_batches = []
    fit = planner.plan()
    assert fit.names == {BF16} and fit.peak_bytes is not None
    with fit.apply() as handle:
        measured = fit_models.peak_on_cuda(one.standing(), lambda: fit_models.applied(handle, one))
    assert measured <= fit.memory_budget and abs(fit.peak_bytes - measured) <= 0.03 * measured


def test_a_plan_in_8_bits_takes_what_was_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "bandwidth", lambda *_: CodingSpeed(1e13, 1e13))
    one = fit_models.training("gpt", "cuda")
    plain = fit_models.peak_on_cuda(one.standing(), lambda: fit_models.plain(one))
    step = TrainingStep(one.model, one.optimizer, one.sample, one.loss, "mean", None)
    planner = Planner(step, plain * 5 // 8, False, {CODED_ACTIVATIONS}, False)
    planner.levers = [CODED_ACTIVATIONS]
    planner.micro_batches = []
    fit = planner.plan()
    assert fit.names == {CODED_ACTIVATIONS} and fit.planned is not None and fit.planned.plan.offloaded
    with fit.apply() as handle:
        measured = fit_models.peak_on_cuda(one.standing(), lambda: fit_models.applied(handle, one))
        assert one.model.plan.offload == "8bit"
    assert measured <= fit.memory_budget and abs(fit.peak_bytes - measured) <= 0.03 * measured


def test_a_step_on_the_host_is_timed_there() -> None:
    optimizer = fit_models.training("gpt", "cuda").optimizer
    before = torch.cuda.memory_allocated()
    assert step_seconds(optimizer, [], device=torch.device("cpu")) > 0
    assert torch.cuda.memory_allocated() == before and not optimizer.state


@pytest.mark.parametrize(("share", "lever"), [(0.6, "offload states"), (0.25, "offload layers")])
def test_what_offloads_is_taken_where_it_is_needed(share: float, lever: str) -> None:
    fit, measured = fit_models.check("optimizer", share, "cuda")
    assert measured is not None and lever in fit.names
