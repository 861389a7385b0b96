"""memopt.fit() on the simulated device: plans with what offloads, held to their budgets and to what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memopt import sim
from memopt._C import format_size
from memopt._checkpoint.stages.costs import bytes_of
from memopt._estimate.search import Names
from memopt._fit import optimizers, pricing
from memopt._fit.optimizers import step_seconds
from memopt._fit.planning import Planner
from memopt._fit.pricing import Prices
from memopt._fit.training_step import TrainingStep
from memopt._offload import pinned_memory
from memopt._offload.schedule_sets import CodingSpeed
from memopt._run.plan import BF16, CODED_ACTIVATIONS, OFFLOAD_LAYERS, options_of
from memopt.optim import _turns
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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("kind", "levers"),
    [
        ("optimizer", ["offload states"]),
        ("optimizer", ["offload gradients"]),
        ("optimizer", ["offload states", "offload gradients", "eight bits"]),
        ("embedded", ["offload states"]),
        ("optimizer", ["offload layers"]),
        ("gpt", ["checkpoint"]),
        ("optimizer", ["states on disk:/tmp"]),
        ("embedded", ["states on disk:/tmp", "offload gradients"]),
    ],
)
@pytest.mark.parametrize("areas", ["small", "large"])
def test_what_a_plan_takes_of_the_host_is_worked_out(
    kind: str, levers: list[str], count: int, areas: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if areas == "small":
        fit_models.small_areas(monkeypatch)
    one = fit_models.training(kind, "cuda")
    plain = fit_models.peak_on_cuda(
        one.standing(), lambda: fit_models.plain(fit_models.training(kind, "cuda"))
    )
    pinned_memory.trim()
    before = sim.stats()["host_bytes"]
    step = TrainingStep(one.model, one.optimizer, one.sample, one.loss, "mean", None)
    planner = Planner(step, plain - plain // 4 if kind == "gpt" else plain, False, {}, False)
    if count > 1:
        levers = [*levers, f"micro-batches:{count}"]
    chosen = planner.prices.attempt(Names(levers))
    planner.prices.stands(chosen)
    pinned_memory.trim()  # of what measured a disk's rate
    fit = planner._result(chosen)
    taken = []
    with fit.apply() as handle:
        for _ in range(2):
            handle.backward(*one.batch)
            taken.append(sim.stats()["host_bytes"] - before)
            handle.optimizer.step()
            taken.append(sim.stats()["host_bytes"] - before)
            handle.optimizer.zero_grad()
        if "offload layers" in levers:  # whose states are not pinned
            states = [s for states in one.optimizer.state.values() for s in states.values()]
            taken.append(max(taken) + bytes_of(states))
    assert fit.host_bytes is not None and max(taken) > 0
    near = 1.25 if "offload layers" in levers else 1.1  # of whose gradients few wait to be added as a rule
    assert max(taken) <= fit.host_bytes <= near * max(taken) + (1 << 16)


@pytest.mark.parametrize("levers", [["factored"], ["offload gradients", "factored"]], ids=" + ".join)
def test_a_parameter_that_is_not_cut_has_a_turn_of_its_own(
    levers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Averages of rows and columns are of all elements."""
    fit_models.small_areas(monkeypatch)
    one = fit_models.training("optimizer", "cuda")
    levers = [*levers, f"states on disk:{tmp_path}"]
    passing = optimizers.bytes_with(one.optimizer, levers, torch.device("cuda", 0)).taken.passing
    mine, undo = optimizers.replaced(one.optimizer, options_of(levers))
    for _ in range(2):
        one.compute(*one.batch).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mine.step()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        mine.zero_grad()
    undo()
    assert abs(sum(passing) - taken) <= 0.05 * taken


@pytest.mark.parametrize("kind", ["optimizer", "embedded"])
@pytest.mark.parametrize(
    "levers",
    [
        ["states on disk:/tmp"],
        ["states on disk:/tmp", "offload gradients"],
        ["states on disk:/tmp", "eight bits"],
        ["states on disk:/tmp", "factored"],
        ["offload states"],
        ["offload states", "factored"],
    ],
)
def test_states_in_small_turns_take_what_was_worked_out(
    levers: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the embedding are more than two turns', and its first step makes them on the device."""
    fit_models.small_areas(monkeypatch)
    for module in (optimizers, _turns):
        monkeypatch.setattr(module, "TURN", 1 << 17)
    one = fit_models.training(kind, "cuda")
    step = TrainingStep(one.model, one.optimizer, one.sample, one.loss, "mean", None)
    planner = Planner(step, 1 << 28, False, {}, False)
    chosen = planner.prices.attempt(Names(levers))
    planner.prices.stands(chosen)
    fit = planner._result(chosen)
    assert fit.peak_bytes is not None
    with fit.apply() as handle:
        measured = fit_models.peak_on_cuda(one.standing(), lambda: fit_models.applied(handle, one))
    assert abs(fit.peak_bytes - measured) <= 0.02 * measured


def test_the_hosts_memory_bounds_what_a_plan_puts_there() -> None:
    plain = fit_models.training("optimizer", "cuda")
    budget = int(0.45 * fit_models.peak_on_cuda(plain.standing(), lambda: fit_models.plain(plain)))
    free = fit_models.training("optimizer", "cuda").fit(budget)
    assert "offload states" in free.names and free.host_bytes > 3 << 20
    assert f"at most {format_size(free.host_bytes)} of its memory is taken" in str(free)
    same = fit_models.training("optimizer", "cuda").fit(budget, host_memory=free.host_bytes)
    assert same.names == free.names
    limited = fit_models.training("optimizer", "cuda").fit(budget, host_memory=free.host_bytes - 1)
    assert limited.names != free.names and (limited.host_bytes or 0) < free.host_bytes
    none = fit_models.training("optimizer", "cuda").fit(budget, host_memory=0)
    assert not none.fits and none.least_budget > budget and "raise host_memory" in str(none)
    assert "with offload states: it takes" in str(none) and "fails, worked out" in str(none)
    assert all(row.fails for row in none.rows if row.host_bytes) and none.as_dict()["host_bytes"] is None
    again = fit_models.training("optimizer", "cuda").fit(none.least_budget, host_memory=0)
    assert again.fits and again.host_bytes == 0


def test_a_disk_has_the_states_that_the_host_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit_models.small_areas(monkeypatch)
    disk = tmp_path / "a:b"
    disk.mkdir()
    share, name = 0.58, f"states on disk:{disk}"
    fit, _ = fit_models.check("optimizer", share, "cuda", disk=disk)
    assert fit.names == {"offload states"}  # which is the faster one
    fit, _ = fit_models.check("optimizer", share, "cuda", host_memory="1MiB")
    assert not fit.fits
    fit, measured = fit_models.check("optimizer", share, "cuda", host_memory="1MiB", disk=disk)
    assert measured is not None and fit.names == {name} and fit.tier == "equal to rounding"
    assert fit.host_bytes == 1 << 19
    alone = {row.levers: row for row in fit.rows}
    assert fit.seconds > alone["offload states",].seconds and alone["offload states",].fails
    assert f'memopt.optim.AdamW(optimizer.param_groups, offload_states="{disk}")' in fit.code()
    assert not [*disk.iterdir()]
    disk.rmdir()
    with pytest.raises(OSError, match="creating a file in"):
        fit.apply()


def test_a_schedule_offloads_nothing_where_the_host_has_no_memory_for_it() -> None:
    plain = fit_models.training("gpt", "cuda")
    budget = int(0.75 * fit_models.peak_on_cuda(plain.standing(), lambda: fit_models.plain(plain)))
    free = fit_models.training("gpt", "cuda").fit(budget, exact=True)
    assert free.names == {"checkpoint"} and free.host_bytes > 0 and "to='cpu'" in free.code()
    one = fit_models.training("gpt", "cuda")
    none = one.fit(budget, exact=True, host_memory=0)
    assert none.names == {"checkpoint"} and none.host_bytes == 0 and "to='cpu', host_memory=0" in none.code()
    before = sim.stats()["host_bytes"]
    with none.apply() as handle:
        assert fit_models.peak_on_cuda(one.standing(), lambda: fit_models.applied(handle, one)) <= budget
        larger = tuple(part.repeat(2, *[1] * (part.dim() - 1)) for part in one.batch)
        with pytest.warns(UserWarning, match="for a batch of another size"):
            handle.backward(*larger)
        plan = handle.model.plan
        assert not plan.keeps_all and not plan.offload_slots
        assert sim.stats()["host_bytes"] == before
