"""memopt.fit() on the CPU: plans within their budgets, what they promise, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt._estimate.search import OTHER, Names, combinations, tier_of
from memopt._fit import planning
from memopt._fit.optimizers import step_seconds
from memopt._fit.pricing import micro_batches_of
from memopt._fit.training_step import TrainingStep
from memopt.chain import InfeasibleBudget
from tests.helpers import fit_models
from tests.helpers.fit_models import KINDS, Training, training

STEPPING = ("fused", "eight bits", "four bits", "step in backward")
SHARES = (0.8, 0.6, 0.4, 0.25)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("allow", [(), ("8bit",), ("8bit", "4bit")], ids=["exact states", "8bit", "4bit"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_the_plan_are_within_the_budget_and_as_its_tier_says(
    kind: str, share: float, allow: tuple[str, ...]
) -> None:
    fit_models.check(kind, share, "cpu", allow=allow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "share"),
    [("gpt", 0.6), ("gpt", 0.25), ("optimizer", 0.9), ("headed", 0.5), ("cnn", 0.85), ("long", 0.1)],
)
def test_a_plan_is_found_where_one_is_known(kind: str, share: float) -> None:
    fit, measured = fit_models.check(kind, share, "cpu")
    assert measured is not None, fit


def test_a_sequence_whose_mlps_are_too_much_runs_through_them_in_tiles() -> None:
    """A schedule makes an MLP's wide results whole, and one sample cannot be divided."""
    fit, _ = fit_models.check("long", 0.25, "cpu")
    assert "tiles" in fit.names and "memopt.nn.tile_mlps(model)" in fit.code()
    assert {lever.name: lever.does for lever in fit.levers}["tiles"] == "MLPs some rows at a time"
    refused = fit_models.training("optimizer").fit(1 << 30).refused
    assert "has no module of 2 to 4 linear layers" in refused["tiles"]
    few = fit_models.training("long")
    few.sample = tuple(part[:, :16] for part in few.sample)  # rows, of a model that is twice as wide
    assert "no more rows than they are wide" in few.fit(1 << 30).refused["tiles"]


def planner_of(one: Training, budget: int, **options: Any) -> planning.Planner:
    step = TrainingStep(one.model, one.optimizer, one.sample, one.loss, "mean", None)
    allowed = {planning.ALLOW[word] for word in options.pop("allow", ())}
    return planning.Planner(step, budget, options.pop("exact", False), allowed, False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.9, 0.6, 0.35])
@pytest.mark.parametrize("kind", ["gpt", "optimizer", "headed", "long"])
def test_all_combinations_tried_one_by_one_hold_no_better_plan(kind: str, share: float) -> None:
    one = training(kind)
    whole = planner_of(one, 1 << 40)
    plain = whole.prices.attempt(Names()).peak
    planner = planner_of(training(kind), int(share * plain), allow=("8bit",))
    fit = planner.plan()
    several = [f"micro-batches:{count}" for count in (2, 4, 8, 16)]
    best: dict[int, float] = {}
    for micro in [[], *([name] for name in several)]:
        for names in [Names(), *combinations([*planner.levers, *micro])]:
            tried = planner.prices.attempt(names)
            if tried.fits and all(size <= planner.budget for size in (tried.in_passes, tried.in_step)):
                tier = tier_of(names)
                best[tier] = min(best.get(tier, float("inf")), tried.seconds)
    if not fit.fits:
        assert not best
        return
    assert fit.names is not None
    assert tier_of(fit.names) == min(best)
    assert fit.rows[0].seconds <= planning.ALIKE * best[min(best)]
    for name in fit.names:  # none of which it could do without
        without = planner.prices.attempt(fit.names - {name})
        assert not without.fits or without.seconds > fit.rows[0].seconds


def of_samples(samples: int) -> Training:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    sample = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    return Training("", model, torch.optim.SGD(model.parameters(), lr=0.1), sample, F.cross_entropy)


@pytest.mark.parametrize("samples", [96, 100, 128])
def test_the_fewest_micro_batches_that_would_do_are_asked(samples: int) -> None:
    """Of those that fit the clock decides on the fastest."""
    whole = planner_of(of_samples(samples), 1 << 40)
    peaks = [whole.prices.attempt(Names([f"micro-batches:{n}"] if n > 1 else [])).peak for n in (1, 9)]
    budget = random.Random(int(os.environ.get("MEMOPT_SEED", "1")) + samples).randint(min(peaks), max(peaks))
    planner = planner_of(of_samples(samples), budget)
    planner.levers = []
    fit = planner.plan()
    assert fit.fits and fit.names
    asked = {micro_batches_of(names): tried.fits for names, tried in planner.prices.attempts.items()}
    assert len(asked) <= 1 + 2 * math.log2(samples) and asked[micro_batches_of(fit.names)]
    fewest = min(count for count, fits in asked.items() if fits)
    size = planner.prices.micro_batch_size(fewest)
    larger = next(n for n in range(size + 1, samples + 1) if planner.prices.count_of(n) < fewest)
    fewer = planner.prices.count_of(larger)
    if fewer > 1:
        assert not planner.prices.attempt(Names([f"micro-batches:{fewer}"])).fits
    assert fit.micro_batch_size == planner.prices.micro_batch_size(micro_batches_of(fit.names))


def snapshot(one: Training) -> list[Any]:
    states = [copy.deepcopy(state) for state in one.optimizer.state.values()]
    return [
        copy.deepcopy(one.model.state_dict()),
        [(id(p), p.data_ptr(), None if p.grad is None else p.grad.clone()) for p in one.model.parameters()],
        states,
        [{**group, "params": list(map(id, group["params"]))} for group in one.optimizer.param_groups],
        torch.get_rng_state(),
        [sorted(vars(module)) for module in one.model.modules()],
        [len(p._post_accumulate_grad_hooks or {}) for p in one.model.parameters()],
        one.model.training,
    ]


def same(mine: Any, other: Any) -> bool:
    """Return whether these are equal to the bit, tensors in them too."""
    if isinstance(mine, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(mine, other)
    if isinstance(mine, dict):
        return list(mine) == list(other) and same(list(mine.values()), list(other.values()))
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(map(same, mine, other))
    return bool(mine == other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stepped", [False, True])
def test_planning_changes_nothing(kind: str, stepped: bool) -> None:
    one = training(kind)
    if stepped:
        fit_models.plain(one, 1)
        one.compute(*one.batch).backward()
    before = snapshot(one)
    peak = fit_models.peak_on_cpu([], lambda: fit_models.plain(training(kind), 1))
    one.fit(peak // 2 + fit_models.bytes_of(one.model.parameters()), allow=("8bit", "4bit"))
    assert same(snapshot(one), before)


def assert_lines_do_what_apply_does(fit: Any, one: Training, two: Training) -> None:
    """The plan is of one, its lines are run for two."""
    assert fit.fits and fit.names
    handle = fit.apply()
    lines = fit.code().splitlines()
    in_step = [line for line in lines if line.startswith("memopt.backward(")]
    names: dict[str, Any] = {"memopt": memopt, "torch": torch, "model": two.model, "optimizer": two.optimizer}
    names |= {"sample": two.sample, "loss": two.loss}
    exec("\n".join(line for line in lines if line not in in_step), names)
    lowered = "# with torch.autocast('cpu', torch.bfloat16):" in lines
    assert lowered == ("bf16" in fit.names and not in_step)
    for _ in range(2):
        wanted = handle.backward(*one.batch)
        handle.optimizer.step()
        handle.optimizer.zero_grad()
        if in_step:
            found = eval(in_step[0], names)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                loss = two.compute(*two.batch)
            loss.backward()
            found = loss.detach()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        assert torch.equal(found, wanted), fit.code()


def test_states_of_a_model_on_the_cpu_go_to_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory that they pass through is the host's, as the model's is."""
    fit_models.small_areas(monkeypatch)
    options = {"reads_gradients": True, "host_memory": 0}  # no steps in the backward pass
    fit, _ = fit_models.check("optimizer", 0.65, "cpu", **options)
    assert not fit.fits and "states on disk" not in fit.refused
    fit, measured = fit_models.check("optimizer", 0.65, "cpu", disk=tmp_path, **options)
    assert measured is not None and fit.names == {f"states on disk:{tmp_path}"} and fit.host_bytes == 0
    assert not [*tmp_path.iterdir()]
    one = training("optimizer")
    assert_lines_do_what_apply_does(
        one.fit(fit.memory_budget, disk=tmp_path, **options), one, training("optimizer")
    )
    other = training("optimizer", optimizer=torch.optim.Adagrad)
    assert "no Adagrad" in other.fit(1 << 30, disk=tmp_path).refused["states on disk"]
    assert training("gpt").fit(1 << 30, disk=tmp_path, exact=True).refused["states on disk"] == "exact=True"


def test_the_lines_to_write_do_what_apply_does() -> None:
    for kind, share in (("gpt", 0.5), ("gpt", 0.25), ("headed", 0.4), ("headed", 0.25), ("optimizer", 0.8)):
        other = training(kind)
        budget = int(share * fit_models.peak_on_cpu(other.standing(), lambda: fit_models.plain(other)))  # noqa: B023
        one = training(kind)
        assert_lines_do_what_apply_does(one.fit(budget), one, training(kind))


def test_where_bf16_is_allowed_the_model_and_the_loss_run_in_autocast() -> None:
    fit, _ = fit_models.check("cnn", 0.5, "cpu", allow=("bf16",))  # and nothing else is enough
    assert "bf16" in fit.names and fit.tier == "other numbers"
    one = training("cnn")
    assert "allow={'bf16'}" in one.fit(fit.memory_budget).refused["bf16"]
    assert_lines_do_what_apply_does(one.fit(fit.memory_budget, allow=("bf16",)), one, training("cnn"))


def test_micro_batches_run_in_autocast_too() -> None:
    def of_two() -> Training:
        one = training("long")
        one.sample = tuple(torch.cat([part, part.flip(1)]) for part in one.sample)
        return one

    one, fewest = of_two(), Names(["micro-batches:2"])
    alone = planner_of(of_two(), 1 << 40).prices.attempt(fewest).peak
    planner = planner_of(one, alone - alone // 8, allow=("bf16",))
    planner.levers = ["bf16"]
    fit = planner.plan()
    assert fit.names == {"bf16", *fewest}
    assert_lines_do_what_apply_does(fit, one, of_two())


def test_bf16_has_its_reasons_against_it() -> None:
    one = training("optimizer")
    with torch.autocast("cpu", torch.bfloat16):
        assert one.fit(1 << 30, allow=("bf16",)).refused["bf16"] == "autocast is on already"
    one.model.bfloat16()
    one.sample = one.sample[0].bfloat16(), one.sample[1]
    assert one.fit(1 << 30, allow=("bf16",)).refused["bf16"] == "no parameter is in fp32"


def test_a_scheduler_of_the_given_optimizer_sets_the_rate_of_the_one_in_its_place() -> None:
    one, other = training("optimizer"), training("optimizer")
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.5) for t in (one, other)]
    budget = int(
        0.8 * fit_models.peak_on_cpu(one.standing(), lambda: fit_models.plain(training("optimizer")))
    )
    fit = one.fit(budget)
    assert fit.tier == "equal to rounding"
    with fit.apply() as handle:
        assert handle.optimizer is not one.optimizer
        for _ in range(3):
            fit_models.applied(handle, one, 1)
            fit_models.plain(other, 1)
            for scheduler in schedulers:
                scheduler.step()
            assert handle.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]
    for mine, wanted in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_several_batches_to_a_step_have_the_gradients_of_one() -> None:
    one, other = training("gpt"), training("gpt")
    fit = one.fit(1 << 30, effective_batch=32)
    handle = fit.apply()
    parts = [handle.backward(*one.batch) for _ in range(2)]
    loss = other.compute(*(torch.cat([part, part]) for part in other.batch))
    loss.backward()
    torch.testing.assert_close(sum(parts), loss.detach())
    for mine, wanted in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_nothing_fits_names_the_least_budget_which_then_does() -> None:
    one = training("cnn")
    fit = one.fit(fit_models.bytes_of(one.model.parameters()) + 4096, exact=True)
    assert not fit.fits and fit.tier is fit.peak_bytes is fit.seconds is None
    assert "nothing fits" in str(fit) and not fit.levers
    with pytest.raises(InfeasibleBudget, match=str(fit.least_budget)):
        fit.apply()
    again = one.fit(fit.least_budget, exact=True)
    assert again.fits
    with again.apply() as handle:
        assert (
            fit_models.peak_on_cpu(one.standing(), lambda: fit_models.applied(handle, one))
            <= fit.least_budget
        )


def test_batch_norm_is_a_reason_against_micro_batches_and_dropout_changes_their_tier() -> None:
    fit = training("cnn").fit(1 << 20)
    assert "BatchNorm2d" in fit.refused["micro-batches"]

    def dropping() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.ReLU(), nn.Linear(256, 10))
        sample = torch.randn(256, 64), torch.randint(0, 10, (256,))
        return Training("", model, torch.optim.SGD(model.parameters(), lr=0.1), sample, F.cross_entropy)

    one = dropping()
    budget = int(0.35 * fit_models.peak_on_cpu(one.standing(), lambda: fit_models.plain(one)))
    refused = dropping().fit(budget)
    assert not refused.fits and "dropout" in refused.refused["micro-batches"]
    allowed = dropping().fit(budget, allow=("dropout",))
    assert allowed.fits and allowed.tier == planning.TIERS[OTHER]


def test_an_optimizer_that_memopt_has_none_for_leaves_the_other_levers() -> None:
    one = training("gpt", optimizer=torch.optim.Adagrad)
    plain = training("gpt", optimizer=torch.optim.Adagrad)
    budget = int(0.6 * fit_models.peak_on_cpu(plain.standing(), lambda: fit_models.plain(plain)))
    fit = one.fit(budget)
    assert fit.fits and "no Adagrad" in fit.refused["fused"]


class Slow(torch.optim.Adagrad):
    """Sleeps in each of its steps."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def test_the_optimizers_step_is_among_the_seconds() -> None:
    one = training("gpt", optimizer=Slow)
    fit = one.fit(1 << 30)
    assert fit.names == frozenset() and fit.seconds is not None and fit.seconds >= 0.05
    steps = {name: step_seconds(training("gpt").optimizer, [name]) for name in STEPPING}
    assert all(seconds > 0 for seconds in steps.values())


@pytest.mark.parametrize("slow", ["fused", "step in backward"])
def test_the_lever_with_the_faster_step_is_taken(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = training("optimizer")
    planner = planner_of(one, 1 << 30)
    planner.levers = ["fused", "step in backward"]
    monkeypatch.setattr(planner.prices, "step_seconds", lambda names: 1.0 if slow in names else 0.0)
    fastest = planner.fastest(tier_of(["fused"]))
    assert fastest is not None and slow not in fastest.names


@pytest.mark.parametrize("name", STEPPING)
def test_the_step_of_some_parameters_is_timed_for_all(name: str) -> None:
    optimizer = training("optimizer").optimizer
    fit_models.plain(training("optimizer"), 1)
    before = copy.deepcopy(optimizer.state_dict())
    values = [p.clone() for p in optimizer.param_groups[0]["params"]]
    assert step_seconds(optimizer, [name], most=1) > 0 and step_seconds(optimizer, [name], most=1 << 20) > 0
    assert same(optimizer.state_dict(), before)
    assert same(optimizer.param_groups[0]["params"], values)


def test_a_model_without_a_chain_is_fitted_by_the_other_levers() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = (x @ self.weight).tanh()
            return x

    model = Alone()
    one = Training(
        "",
        model,
        torch.optim.AdamW(model.parameters()),
        (torch.randn(128, 64), torch.randn(128, 64)),
        F.mse_loss,
    )
    budget = int(0.6 * fit_models.peak_on_cpu(one.standing(), lambda: fit_models.plain(one, 1)))
    fit = one.fit(budget)
    assert fit.fits and "checkpoint" in fit.refused and fit.micro_batch_size is not None
    with fit.apply() as handle:
        assert fit_models.peak_on_cpu(one.standing(), lambda: fit_models.applied(handle, one)) <= budget


def test_the_result_is_text_html_and_a_dict() -> None:
    import json

    fit = training("gpt").fit(6 << 20)
    assert json.loads(json.dumps(fit.as_dict()))["fits"] is fit.fits
    html = fit._repr_html_()
    assert html.count("position:absolute") == len(fit.rows) and "<script" not in html
    assert str(fit).startswith("GPT takes ")
    assert isinstance(fit, memopt.types.Fit)
    assert [lever.name for lever in fit.levers] and all(lever.tier == fit.tier for lever in fit.levers)


# ---- bad input -------------------------------------------------------------------------------------------------------


def other_optimizer(one: Training) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "parameters": (other_optimizer, ValueError, "not one of GPT's"),
    "list": (lambda one: {"optimizer": [one.optimizer, one.optimizer]}, TypeError, "give one optimizer"),
    "no optimizer": (lambda one: {"optimizer": None}, TypeError, "torch.optim.Optimizer"),
    "no model": (lambda one: {"model": len}, TypeError, "torch.nn.Module"),
    "sample": (
        lambda one: {"sample": (torch.randn(2, 3), torch.randn(2))},
        ValueError,
        "do not run on sample",
    ),
    "empty": (lambda one: {"sample": ()}, ValueError, "empty"),
    "no loss": (lambda one: {"loss": None, "sample": one.batch[0]}, ValueError, "give loss="),
    "loss of samples": (
        lambda one: {
            "loss": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
        },
        ValueError,
        "reduce it",
    ),
    "budget": (lambda one: {"memory_budget": "eight"}, ValueError, "eight"),
    "share": (lambda one: {"memory_budget": 1.5}, ValueError, "memory_budget=1.5"),
    "small": (lambda one: {"memory_budget": 1000}, ValueError, "the parameters alone"),
    "allow": (lambda one: {"allow": ("16bit",)}, ValueError, "'16bit'"),
    "allow text": (lambda one: {"allow": "8bit"}, ValueError, "collection"),
    "effective": (lambda one: {"effective_batch": 24}, ValueError, "no multiple"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_before_anything_changes(what: str) -> None:
    one = training("gpt")
    make, kind, text = BAD[what]
    given = {"model": one.model, "optimizer": one.optimizer, "sample": one.sample, "loss": one.loss}
    given |= {"memory_budget": "1GiB"} | make(one)
    before = snapshot(one)
    with pytest.raises(kind, match=text):
        memopt.fit(given.pop("model"), given.pop("optimizer"), given.pop("sample"), **given)
    assert same(snapshot(one), before)


def test_a_planned_model_and_a_second_apply_are_refused() -> None:
    one = training("gpt")
    fit = one.fit(6 << 20)
    with fit.apply():
        with pytest.raises(ValueError, match="undo_checkpoint"):
            one.fit(6 << 20)
        with pytest.raises(ValueError, match="runs by a plan already"):
            fit.apply()
    fit.apply().remove()
    gc.collect()


def test_a_model_with_other_modules_than_were_planned_for_is_refused() -> None:
    one = training("gpt")
    fit = one.fit(6 << 20)
    assert fit.planned is not None
    name = next(name for name, module in one.model.named_modules() if module in fit.planned.forwards)
    one.model.set_submodule(name, copy.deepcopy(one.model.get_submodule(name)))
    before = snapshot(one)
    with pytest.raises(ValueError, match="call memopt.fit"):
        fit.apply()
    assert same(snapshot(one), before)


# ---- the plan that was tested is the one in force --------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "share"), [("gpt", 0.6), ("gpt", 0.25), ("cnn", 0.8)])
def test_steps_run_by_the_schedule_that_was_tested(kind: str, share: float) -> None:
    plain = training(kind)
    budget = int(share * fit_models.peak_on_cpu(plain.standing(), lambda: fit_models.plain(plain)))
    one = training(kind)
    fit = one.fit(budget)
    assert fit.planned is not None and fit.peak_bytes == fit.planned.plan.peak_bytes
    calls: list[nn.Module] = []
    counted = one.model.register_forward_pre_hook(lambda *_: calls.append(one.model))
    with fit.apply() as handle:
        assert not calls  # nothing is measured anew, by other seconds
        counted.remove()
        for _ in range(3):
            fit_models.applied(handle, one, 1)
            assert one.model.plan is fit.planned.plan
        check = one.model.plan.check()
        assert check.memory_budget == budget and check.within and check.measured_bytes


def test_a_plan_that_leaves_room_is_replaced_by_a_faster_one_within_the_budget() -> None:
    plain = training("gpt")
    peak = fit_models.peak_on_cpu(plain.standing(), lambda: fit_models.plain(plain))
    planner = planner_of(training("gpt"), int(0.8 * peak))
    names = Names(["checkpoint"])
    budget, planner.prices.budget = planner.prices.budget, int(0.5 * peak)
    small = planner.prices.attempt(names)
    assert planner.prices.stands(small) and planner.prices.with_more_room(small) is small
    planner.prices.budget = budget  # as if far less had been worked out to be free than was
    faster = planner.prices.with_more_room(small)
    assert faster.seconds < small.seconds and small.tested < faster.tested <= budget
    assert faster.candidate is not None and faster.candidate[0].peak_bytes == faster.tested
    assert planner.prices.attempt(names) is faster


def test_a_plan_under_autocast_is_applied_outside_of_it() -> None:
    one = training("gpt")

    def compute(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return one.compute(*batch)

    with torch.autocast("cpu", torch.bfloat16):
        fit = one.fit(6 << 20)
    assert fit.names == {"checkpoint"} and fit.planned is not None
    with fit.apply():
        compute(*one.batch).backward()
        assert one.model.plan is fit.planned.plan


def test_a_micro_batch_has_no_more_samples_than_asked_for() -> None:
    model, sizes = nn.Linear(4, 1), []

    def compute(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return model(x).square().mean()

    x = torch.randn(10, 4)
    loss = memopt.backward(compute, x, model=model, exact=False, micro_batch_size=4)
    assert sorted(sizes) == [3, 3, 4]
    torch.testing.assert_close(loss, model(x).square().mean().detach())
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        memopt.backward(compute, x, model=model, micro_batch_size=0)
