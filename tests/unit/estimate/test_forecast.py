"""The forecast from a script's own run, beside sums by hand; and a search by it, beside all combinations."""

from __future__ import annotations

import os
import random

import pytest
from test_fit_search import every

from memopt._estimate.answer import Answer
from memopt._estimate.cards import Rates
from memopt._estimate.forecast import WORKED_OUT, Forecast, Known, _peak, _shares
from memopt._estimate.runs_ahead import RunsAhead
from memopt._estimate.search import ALIKE, Names, Search, Tried, tier_of
from memopt._estimate.step_time import DISK_RATE, Segment, seconds

RATES = Rates("made-up", half=100e12, tf32=50e12, single=10e12, memory=1e12, link=10e9)
GIB = 1 << 30
# Of a backward pass, and of the optimizer's step: parameters, gradients, states, temporaries, activations, other.
MOMENTS = [[4, 4, 8, 0, 9, 1], [4, 4, 8, 4, 0, 1]]

FAILED = "it failed"


def forecast_of(moments):
    operators = [("fp32", 0.0, 100e9)]
    return Forecast(moments, [Segment(operators) for _ in range(3)], RATES, 100, 1.2)


@pytest.mark.parametrize(
    ("names", "least"),
    [
        ([], 26),
        (["fused"], 26),
        (["eight bits"], 20),
        (["four bits"], 19),
        (["factored"], 22),
        (["eight bits", "factored"], 19),
        (["bf16"], 21),
        (["offload states"], 18),
        (["states on disk:/a:b"], 18),
        (["states on disk:/a:b", "checkpoint:9"], 9),
        (["offload gradients", "offload states"], 14),
        (["checkpoint:9"], 21),
        (["checkpoint:9", "fused"], 17),
        (["loss head", "offload states", "step in backward"], 5),
        (["offload layers"], 5),
        (["expandable"], 26),
    ],
)
def test_the_fullest_moment_without_what_is_taken_away(names, least):
    assert forecast_of([[1000 * one for one in row] for row in MOMENTS]).least(names) == 1000 * least + 100


@pytest.mark.parametrize(
    ("names", "host"),
    [
        (["fused"], 0),
        (["offload states"], 8),
        (["offload states", "eight bits"], 2),
        (["states on disk:/a:b", "offload gradients"], 4),
        (["offload gradients", "offload states"], 12),
        (["offload layers"], 16),
        (["offload layers", "states on disk:/a:b"], 8),
    ],
)
def test_what_is_put_on_the_host_takes_its_memory(names, host):
    forecast = forecast_of([[1000 * one for one in row] for row in MOMENTS])
    assert forecast.host(names) == 1000 * host
    search = Search(names, 10**6, 10**6, RunsAhead(lambda chosen: FAILED), 0.3, forecast)
    for limit in (1000 * host, 900 * host):
        forecast.host_memory = limit
        assert search.could_fit(names) == (limit == 1000 * host)


def test_what_runs_with_one_technique_save_is_added_up_but_no_more_than_there_is():
    """Activations of 9 become 5 with one and 6 with the other; then 1 and 2."""
    thousands = [[1000 * one for one in row] for row in MOMENTS]
    for (first, second), needed in (((5, 6), 26 - 4 - 3), ((1, 2), 17)):
        forecast = forecast_of(thousands)
        for name, activations in (("checkpoint:9", first), ("loss head", second)):
            moments = [[*row[:4], min(row[4], 1000 * activations), row[5]] for row in thousands]
            forecast.alone[name] = Known(moments, 1.0)
        together = forecast.needed(["checkpoint:9", "loss head", "fused"])
        assert together == pytest.approx(1000 * needed + 100, rel=0.02)


def test_a_steps_seconds_with_one_pass_in_the_place_of_the_optimizers_operators():
    """Gradients of 2 GiB and states of 4 GiB on 1 TB/s, a link of 10 GB/s; a backward pass of 0.1 s hides a part."""
    forecast = forecast_of([[2 * GIB, 2 * GIB, 4 * GIB, 0, 0, 0]])
    assert forecast.seconds([]) == pytest.approx(0.3, rel=1e-3)
    for names, passes, copies in (
        (["fused"], 16, 0),
        (["eight bits"], 8, 0),
        (["offload states"], 14, 4 * GIB / 10e9 - 14 * GIB / 1e12),
        (["states on disk:/a:b"], 14, 8 * GIB / DISK_RATE - 14 * GIB / 1e12),
        (["offload gradients"], 14, (2 * GIB / 10e9 - 0.1) + (2 * GIB / 10e9 - 14 * GIB / 1e12)),
    ):
        assert forecast.seconds(names) == pytest.approx(0.2 + passes * GIB / 1e12 + copies, rel=1e-3), names
    assert forecast.seconds(["expandable"]) == seconds(forecast.step, RATES)
    assert forecast.seconds(["tiles"]) > forecast.seconds(["offload activations"])
    forecast.alone["tiles"] = Known(forecast.moments, 0.25)
    assert forecast.seconds(["tiles"]) == pytest.approx(0.25)


def script_of(chance):
    """A script by its moments, and a run of it with techniques; those with a run of their own change activations."""
    worked_out = ("fused", "eight bits", "offload states", "offload gradients", "expandable")
    names = [one for one in worked_out if chance.random() < 0.8]
    factors = {
        one: chance.choice([0.2, 0.6, 1.0]) for one in ("checkpoint:9", "offload activations", "loss head")
    }
    names += [one for one in factors if chance.random() < 0.7]
    moments = [[1000, 1000, 2000, 0, chance.randrange(8000), 50], [1000, 1000, 2000, 1000, 0, 50]]
    broken = {one for one in names if chance.random() < 0.1}
    room = chance.randrange(1500, 9000)
    asked = []

    def attempt(chosen):
        asked.append(chosen)
        if chosen & broken:
            return FAILED
        rows = [list(row) for row in moments]
        for row in rows:
            for name in chosen - WORKED_OUT:
                row[4] = int(row[4] * factors[name])
        needed = int(1.005 * _peak(rows, _shares({*chosen}))) + 100
        took = forecast_of(moments).seconds(chosen & WORKED_OUT) + 0.01 * len(chosen - WORKED_OUT)
        return Tried(needed <= room, needed, took, Answer(needed, needed, more={"moments": rows}))

    return names, room, moments, attempt, asked


def test_a_search_by_it_finds_the_lowest_tier_in_fewer_runs():
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    runs, without, found = 0, 0, 0
    for _ in range(200):
        names, room, moments, attempt, asked = script_of(chance)
        forecast = forecast_of(moments)
        needed = forecast.least([])
        if needed <= room or not names:
            continue
        plan = next(Search(names, needed, room, RunsAhead(attempt), 0.3, forecast).found(), None)
        runs += len(asked)
        asked.clear()
        next(Search(names, needed, room, RunsAhead(attempt), 0.3).found(), None)
        without += len(asked)
        fitting = [one for one in every(names) if (tried := attempt(one)) != FAILED and tried.fits]
        assert (plan is not None) == bool(fitting), (names, room, moments, fitting)
        if plan is not None:
            found += 1
            assert plan in fitting and tier_of(plan) == min(map(tier_of, fitting))
            for rest in (plan - {name} for name in plan):  # no part without a use
                assert rest not in fitting or attempt(rest).seconds > ALIKE * attempt(plan).seconds
    assert found > 50 and runs < 0.9 * without, (found, runs, without)


def test_a_technique_that_fails_with_others_is_tried_alone():
    """Offloaded states do not run: the search is told by a run of theirs, and the next combination has none."""
    moments = [[1000, 1000, 2000, 1000, 0, 0]]

    def attempt(chosen):
        return FAILED if "offload states" in chosen else Tried("eight bits" in chosen, 2500, 1.0)

    search = Search(
        ["offload states", "fused", "eight bits"], 5000, 3000, RunsAhead(attempt), 0.3, forecast_of(moments)
    )
    assert next(search.found()) == Names(["eight bits"])
