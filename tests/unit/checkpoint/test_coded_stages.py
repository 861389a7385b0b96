"""Stages of a schedule whose saved sets stay in 8 bits: what runs, the bytes that the plan says, and gradients."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch
from test_auto_checkpoint import live_peak, make, step
from test_chain_offload import everything
from test_chain_runner import backward_of
from torch import nn

import memopt
from memopt._checkpoint import checked_plan, shape_plans
from memopt._checkpoint.checked_plan import chain_stage
from memopt._checkpoint.drop_in import sequential
from memopt._checkpoint.runner import ChainRunner
from memopt._checkpoint.stages.costs import StageBytes, StageSeconds
from memopt._offload import schedule_sets
from memopt._offload.schedule_sets import CodingSpeed, ScheduleOffload, bandwidth
from memopt.chain import Chain, InfeasibleBudget, Schedule
from tests.helpers.fit_models import peak_on_cpu
from tests.helpers.residual import Residual
from tests.helpers.small_gpt import SmallGPT, next_token_loss, sentences

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = int(os.environ["MEMOPT_SEED"])
CPU = torch.device("cpu")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coding takes no time."""
    for module in (shape_plans, sequential):
        monkeypatch.setattr(module, "bandwidth", lambda *_: CodingSpeed(1e13, 1e13))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return the relative error of all gradients together."""
    squares = ((a - b).square().sum() for a, b in zip(got, wanted, strict=True))
    return float((sum(squares) / sum(b.square().sum() for b in wanted)).sqrt())


# ---- the plan --------------------------------------------------------------------------------------------------------


def planned_gpt(share: float, **options) -> tuple[nn.Module, torch.Tensor, Callable, int]:
    """Return a transformer with a plan for this share of the plain step's peak, its sample, loss and budget."""
    torch.manual_seed(0)
    model, x = SmallGPT(), sentences(8)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return next_token_loss(logits, x)

    budget = int(share * peak_on_cpu([*model.parameters(), x], lambda: step(model, x, loss)))
    memopt.auto_checkpoint(
        model, x, memory_budget=budget, loss=loss, to="8bit", keeps_output=False, **options
    )
    return model, x, loss, budget


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_a_plan_codes_within_its_budget(fast: None, share: float) -> None:
    model, x, loss, budget = planned_gpt(share)
    plain = SmallGPT()
    plain.load_state_dict(model.state_dict())
    step(plain, x, loss)
    peaks = []
    for _ in range(2):
        model.zero_grad()
        peaks.append(peak_on_cpu([*model.parameters(), x], lambda: step(model, x, loss)))
    plan = model.plan
    assert plan.offloaded and not any(op in ("sent", "fetch") for op, *_ in plan.operations)
    assert max(peaks) <= budget
    assert 0.97 * plan.predicted_bytes <= max(peaks) <= 1.01 * plan.predicted_bytes
    assert 0 < error(gradients(model), gradients(plain)) < 0.02
    assert "all, in 8 bits" in str(plan) and "is kept in 8 bits, as" in str(plan)
    assert {stage["keeps"] for stage in plan.as_dict()["stages"]} >= {"all, in 8 bits"}
    memopt.undo_checkpoint(model)
    model.zero_grad()
    step(model, x, loss)
    assert error(gradients(model), gradients(plain)) == 0


def test_what_fits_as_it_is_is_not_coded(fast: None) -> None:
    model, x, loss, _ = planned_gpt(1.2)
    plain = SmallGPT()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.zero_grad()
        step(one, x, loss)
    assert model.plan.keeps_all and all(map(torch.equal, gradients(model), gradients(plain)))


def test_slow_coding_gives_way_to_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: CodingSpeed(1, 1))
    model, *_ = planned_gpt(0.6)
    assert not model.plan.offloaded


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_live_bytes_are_never_more_than_predicted(
    monkeypatch: pytest.MonkeyPatch, fast: None, kind: str
) -> None:
    """Of any schedule with any of its stages' options, on measured chains."""
    choose = random.Random(SEED)

    def some_schedule(chain: Chain, *_: object) -> tuple[Schedule, int]:
        names = [[option.name for option in stage.options] for stage in chain.stages]
        ops = (
            [op[:2] for op in everything(len(names) - 1)] if first else backward_of(choose, 0, len(names) - 1)
        )
        away = ["offload" if "offload" in one and (first or choose.random() < 0.5) else None for one in names]
        return Schedule(
            chain, [(op, k, away[k]) if op in ("fall", "bwd") and away[k] else (op, k) for op, k in ops]
        ), 0

    monkeypatch.setattr(checked_plan, "fastest", some_schedule)
    model, sample, loss = make(kind)
    for n in range(3):
        first = n == 0
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss, to="8bit")
        for _ in range(2):
            model.zero_grad()
            taken = live_peak(model, sample, loss)
            assert taken <= 1.01 * model.plan.predicted_bytes, (SEED, kind, model.plan.operations)
        assert model.plan.offloaded or not first


def test_a_stage_takes_the_seconds_of_its_codes_besides() -> None:
    size = StageBytes(
        *(1000, 100, 100, 50, 400, 0, 70, 0, 3, True, False, 900),
        movable=800,
        codable=600,
        codes=150,
        coding_overhead=90,
        late_overhead=500,
    )
    stage = chain_stage("one", size, StageSeconds(1.0, 1.0, 1.0, 2.0), CodingSpeed(300, 600))
    [option] = [one for one in stage.options if one.name == "offload"]
    assert (option.saved_bytes, option.forward_seconds, option.backward_seconds) == (550, 1.5, 2.25)
    assert (option.forward_overhead_bytes, option.backward_overhead_bytes) == (1000 - 550 + 90, 500)
    none = chain_stage(
        "one", size._replace(codable=0), StageSeconds(1.0, 1.0, 1.0, 2.0), CodingSpeed(300, 600)
    )
    assert not any(one.name == "offload" for one in none.options)


def test_the_speed_of_coding_is_measured() -> None:
    speed = bandwidth("8bit", CPU)
    assert isinstance(speed, CodingSpeed) and min(speed) > 1e7
    assert bandwidth("8bit", CPU) is speed
    assert speed.forward(1.0, int(speed.out)) == pytest.approx(2.0)
    assert speed.backward(1.0, int(speed.back)) == pytest.approx(2.0)


# ---- the runner ------------------------------------------------------------------------------------------------------


def coded_runs(modules: list[nn.Module], x: torch.Tensor, backwards: int = 1) -> list[torch.Tensor]:
    runner = ChainRunner(modules, everything(len(modules)), offload=ScheduleOffload("8bit", least_bytes=1024))
    torch.manual_seed(1)
    loss = runner(x).float().square().sum()
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    grads = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return grads


def plain_runs(modules: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    copied = copy.deepcopy(nn.Sequential(*modules))
    copied(x).float().square().sum().backward()
    return gradients(copied)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_near_those_of_a_graph_that_is_kept_too(autocast: bool) -> None:
    torch.manual_seed(0)
    modules, x = [Residual(32) for _ in range(4)], torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted, got, twice = plain_runs(modules, x), coded_runs(modules, x), coded_runs(modules, x, 2)
    assert 0 < error(got, wanted) < 0.02
    assert error([grad / 2 for grad in twice], wanted) < 0.02  # what is wanted again is made again


class Saves(nn.Module):
    """Saves what it is given to save, and an integer tensor of its own."""

    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.kept = [kept]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(1024).flip(0)
        return (x * 2 * self.kept[0]).exp()[index]


def test_what_lives_elsewhere_and_integers_are_not_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[torch.dtype, int]] = []
    transfer = schedule_sets.CodedTransfer

    def noted(flat: torch.Tensor, stream: int) -> object:
        sizes.append((flat.dtype, flat.numel()))
        return transfer(flat, stream)

    monkeypatch.setattr(schedule_sets, "CodedTransfer", noted)
    kept = torch.rand(1024)
    coded_runs([Saves(kept), Saves(kept)], torch.rand(1024, requires_grad=True))
    # Of each: the result of exp(); neither the other factor nor the index.
    assert sizes == [(torch.float32, 1024)] * 2


class Statistics(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(64, 1).exp()
        return (wide.sum(1).exp() / 2).reshape(64, -1).sum(0)[:, None] * x


def test_a_stages_statistics_of_rows_are_not_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    transfer = schedule_sets.CodedTransfer

    def noted(flat: torch.Tensor, stream: int) -> object:
        sizes.append(flat.numel())
        return transfer(flat, stream)

    monkeypatch.setattr(schedule_sets, "CodedTransfer", noted)
    rows = 0.01 * torch.rand(32, 64)
    coded_runs([Statistics(), Statistics()], rows.requires_grad_())
    assert sizes == [64 * 32 * 64] * 2


def test_an_exception_in_a_stage_codes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise torch.OutOfMemoryError("as if")

    coded: list[object] = []
    monkeypatch.setattr(schedule_sets, "CodedTransfer", lambda *given: coded.append(given))
    with pytest.raises(torch.OutOfMemoryError, match="as if"):
        coded_runs([Fails(32)], torch.randn(64, 32))
    assert not coded


def test_a_sequence_of_functions_codes_too(fast: None) -> None:
    torch.manual_seed(3)
    functions = nn.Sequential(*(Residual(64) for _ in range(5)))
    copied, x = copy.deepcopy(functions), torch.randn(256, 64)
    with pytest.raises(InfeasibleBudget) as least:
        memopt.checkpoint_sequential(functions, None, x, memory_budget=1)
    budget = int(least.value.least_budget * 1.5)
    memopt.checkpoint_sequential(
        functions, None, x, memory_budget=budget, to="8bit"
    ).square().sum().backward()
    copied(x).square().sum().backward()
    assert 0 < error(gradients(functions), gradients(copied)) < 0.02
