"""The search of `memopt fit` and of the advice, on tables of bytes: beside all combinations, tried one by one."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from memopt._estimate import advice, cards, search
from memopt._estimate.answer import Answer
from memopt._estimate.forecast import Forecast
from memopt._estimate.runs_ahead import RunsAhead
from memopt._estimate.search import PAGES, Names, Search, Tried, tier_of
from memopt._estimate.step_time import Segment

BEHIND = {"checkpoint": ":9", "states on disk": ":/a:b"}
NAMES = [name + BEHIND.get(name, "") for name in search._TIER if name != "pool"]
PLAIN = 1000
FAILED = "it failed"


def allowed(names):
    """Return whether these can be run together, said in another way."""
    plain = sorted(name.partition(":")[0] for name in names)
    pairs = {("eight bits", "four bits"), ("offload gradients", "step in backward")}
    pairs |= {("micro-batches", "step in backward")}
    pairs |= {*itertools.combinations(("activations in 8 bits", "checkpoint", "offload activations"), 2)}
    pairs |= {("offload states", "states on disk"), ("states on disk", "step in backward")}
    pairs |= {tuple(sorted(("fused", option))) for option in search.OPTIONS}
    return not pairs & {*itertools.combinations(plain, 2)}


def table(chance, phases):
    """A script of as many phases, of which the fullest decides: what each technique saves there, and its time."""
    names = chance.sample(NAMES, chance.randrange(1, 8))
    bases = [PLAIN, *(chance.randrange(500, PLAIN) for _ in range(phases - 1))]
    saves = {name: [chance.randrange(0, 200) * chance.randrange(2) for _ in bases] for name in names}
    seconds = {name: chance.choice([0.5, 1.0, 2.5, 7.0]) for name in names}
    broken = {name for name in names if chance.random() < 0.1}
    room = PLAIN - chance.randrange(1, 400)
    asked = []

    def attempt(chosen):
        assert chosen and allowed(chosen)
        asked.append(chosen)
        if chosen & broken:
            return FAILED
        needed = max(base - sum(saves[name][n] for name in chosen) for n, base in enumerate(bases))
        return Tried(needed <= room, needed, sum(seconds[name] for name in chosen))

    return names, room, attempt, asked


def every(names):
    sets = (Names(c) for n in range(1, len(names) + 1) for c in itertools.combinations(names, n))
    return [one for one in sets if allowed(one)]


@pytest.mark.parametrize("phases", [1, 3])
def test_the_lowest_tier_that_has_anything_is_found_in_few_runs(phases):
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    found = 0
    for _ in range(300):
        names, room, attempt, asked = table(chance, phases)
        plans = [*Search(names, PLAIN, room, RunsAhead(attempt)).found()]
        runs = len(asked)
        assert runs == len({*asked}) and runs <= 12 * len(names)
        fitting = [one for one in every(names) if (tried := attempt(one)) != FAILED and tried.fits]
        tiers = sorted({tier_of(one) for one in fitting})
        assert bool(plans) == bool(fitting)
        if plans:
            found += 1
            assert tier_of(plans[0]) == tiers[0]
            assert all(plan in fitting for plan in plans)
            assert all(plan - {name} not in fitting for plan in plans for name in plan)
    assert found > 50


@pytest.mark.parametrize("forecasts", [False, True])
def test_runs_ahead_change_no_answer(forecasts):
    """What was tried is told in the order in which it was asked for, and nothing else."""
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    ahead = 0
    for _ in range(100):
        names, room, attempt, asked = table(chance, 2)
        forecast = Forecast([[0, 0, 0, 0, PLAIN, 0]], [Segment()], cards.card("8GiB").rates, 0, 1.0)
        found, made = [], []
        for jobs in (1, 3):
            with RunsAhead(_with_moments(attempt), jobs) as runs:
                search = Search(names, PLAIN, room, runs, 0.0, forecast if forecasts else None)
                plans = [*search.found()]
            found.append((plans, [*search.tried], search.failed, [*search.alone]))
            made.append(len(asked))
            forecast.alone.clear()
        assert found[0] == found[1], (names, room)
        ahead += made[1] - 2 * made[0]
    assert ahead > 0  # some were of no use


def _with_moments(attempt):
    def run(names):
        tried = attempt(names)
        if tried == FAILED:
            return tried
        moments = [[0, 0, 0, 0, tried.needed, 0]]
        return tried._replace(answer=Answer(tried.needed, tried.needed, more={"moments": moments}))

    return run


def test_where_bytes_add_up_it_is_the_fastest():
    """But for states of 4 bits: they change numbers more, and are left where 8 are enough."""
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    for _ in range(200):
        names, room, attempt, _ = table(chance, 1)
        plan = next(Search(names, PLAIN, room, RunsAhead(attempt)).found(), None)
        if plan is None:
            continue
        seconds = {
            one: tried.seconds for one in every(names) if (tried := attempt(one)) != FAILED and tried.fits
        }
        fours = {one for one in seconds if "four bits" in one} if Names(["eight bits"]) in seconds else {}
        same = [time for one, time in seconds.items() if tier_of(one) == tier_of(plan) and one not in fours]
        assert seconds[plan] == min(same)


@pytest.mark.parametrize(("saved", "kept"), [(1.0, True), (0.001, False), (-1.0, False)])
def test_a_part_that_is_not_needed_stays_if_it_saves_time(saved, kept):
    def attempt(names):
        return Tried(
            "offload layers" in names,
            PLAIN - 1,
            5.0 + ("offload layers" in names) - saved * ("fused" in names),
        )

    found = next(Search(["fused", "offload layers"], PLAIN, PLAIN - 1, RunsAhead(attempt), 5.0).found())
    assert found == {"offload layers", *(["fused"] if kept else [])}


@pytest.mark.parametrize("forecasts", [False, True])
def test_what_takes_nobody_knows_how_long_comes_last(forecasts):
    """As a checkpoint of a script whose steps have shapes of their own: each step makes a plan. It was run."""

    def attempt(names):
        times = {"loss head": 2.0, "tiles": 0.0}
        return Tried(True, PLAIN // 2, sum(map(times.get, names)) if all(map(times.get, names)) else 0.0)

    forecast = Forecast([[0, 0, 0, 0, PLAIN, 0]], [Segment()], cards.card("8GiB").rates, 0, 1.0)
    runs = RunsAhead(_with_moments(attempt))
    search = Search(["tiles", "loss head"], PLAIN, PLAIN - 1, runs, 1.0, forecast if forecasts else None)
    assert next(search.found()) == {"loss head"}
    assert Names(["tiles"]) in search.tried


def test_two_that_do_not_run_together_are_tried_without_one_another():
    def attempt(chosen):
        if chosen >= {"offload states", "offload layers"}:
            return FAILED
        saved = 100 * len(chosen) + 200 * ({"offload states", "loss head"} <= chosen)
        return Tried(saved >= 400, PLAIN - saved, 1.0)

    names = ["offload states", "offload layers", "loss head"]
    assert [*Search(names, PLAIN, PLAIN - 400, RunsAhead(attempt)).found()] == [
        {"offload states", "loss head"}
    ]


@pytest.mark.parametrize(("growing", "plan"), [(1000, 990), (920, 915), (800, None)])
def test_a_checkpoint_gets_expandable_segments_if_it_fits_with_them(growing, plan):
    """These have room for `growing` of 1000 MiB, fixed ones for 920."""
    mib = 1 << 20

    def attempt(names):
        given = next(int(name.partition(":")[2]) for name in names if name.startswith("checkpoint"))
        return Tried(
            given <= (growing if "expandable" in names else 920) * mib, given, 2.0 - given / (10000 * mib)
        )

    found = Names([f"checkpoint:{900 * mib}"])
    search = Search(found, 2000 * mib, 1000 * mib, RunsAhead(attempt), 1.0)
    expected = found if plan is None else {f"checkpoint:{plan * mib}", "expandable"}
    assert search.with_more_room(found, 1000 * mib + PAGES, native=True) == expected


@pytest.mark.parametrize(
    ("largest", "seconds", "room", "budget"),
    [
        (970, 2.0, 1000, 960),  # of 1000 the largest share in question that fits
        (995, 2.0, 1000, 990),
        (905, 2.0, 1000, 900),  # no more than what was found
        (2000, 1.0, 1000, 900),  # and nothing where it takes no more time than the script as it is
        (970, 0.0, 1000, 960),  # of unknown time the largest
    ],
)
def test_a_checkpoint_gets_the_budget_that_is_left(largest, seconds, room, budget):
    mib = 1 << 20

    def attempt(names):
        given = next(int(name.partition(":")[2]) for name in names if name.startswith("checkpoint"))
        return Tried(given <= largest * mib, given, max(0.0, seconds - given / (room * mib) / 10))

    found = Names([f"checkpoint:{900 * mib}", "fused"])
    plain = 1.0
    asked = Search(found, 2000 * mib, room * mib, RunsAhead(attempt), plain).with_more_room(
        found, room * mib + PAGES, native=False
    )
    assert asked == Names([f"checkpoint:{budget * mib}", "fused"])


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        (1.0, 790),  # of 1000 and 200 beside it, 99 %
        (1.1, 691),  # the allocator's pieces: no more than that fits
        (9.0, None),  # nothing does
    ],
)
@pytest.mark.parametrize("technique", ["offload activations", "activations in 8 bits"])
def test_activations_stay_on_the_device_where_there_is_room(held, kept, technique):
    """By default 50 do. The less goes, the faster."""
    mib, asked = 1 << 20, []

    def attempt(names):
        name = next(name for name in names if name.startswith(technique))
        keep = int(name.partition(":")[2] or 50 * mib)
        asked.append(keep // mib)
        peak = 200 * mib + keep
        fits = peak * (held if keep > 50 * mib else 1) <= 1000 * mib
        return Tried(fits, peak, 3.0 - keep / (1000 * mib), Answer(peak, peak))

    found = Names([technique, "fused"])
    plan = Search(found, 2000 * mib, 1000 * mib, RunsAhead(attempt), 1.0).with_more_room(
        found, 1000 * mib + PAGES, native=False
    )
    own = next(name for name in plan if name.startswith(technique))
    size = int(own.partition(":")[2] or 0) // mib
    assert plan - {own} == {"fused"} and len(asked) <= 5
    if kept is None:
        assert plan == found
    else:
        assert kept - 60 <= size <= kept
    given = ['to="8bit"'] if technique == "activations in 8 bits" else []
    given += [f'keep="{size}MiB"'] if size else []
    line = f"memopt.offload_activations({', '.join(given)}) around the forward pass"
    assert line in advice.in_words(plan, {"fused": ["AdamW"], technique: ["GPT"]})


def test_a_script_that_fits_with_all_it_saves_on_the_device_keeps_that():
    """As where nothing is slower: there is no more to gain."""
    asked = []

    def attempt(names):
        asked.append(names)
        return Tried(True, 0, 1.0, Answer(0, 0))

    found = Names(["offload activations", "expandable"])
    search = Search(found, 2000, 1000, RunsAhead(attempt), 1.0)
    assert search.with_more_room(found, 1000 + PAGES, native=True) == found and len(asked) == 1


@pytest.mark.parametrize("wrong", [False, True])
def test_where_nothing_can_fit_by_the_forecast_few_runs_say_whether_it_is_right(wrong):
    """As of a script that runs out of memory while it makes its model, which no technique changes; some do not run."""
    names = [name for name in NAMES if name != "checkpoint:9"]
    asked = []

    def attempt(chosen):
        asked.append(chosen)
        if chosen & {"step in backward", "tiles", "fused"}:
            return FAILED
        needed = 2 * PLAIN - 9 * ("offload states" in chosen)
        return Tried(wrong and "loss head" in chosen, needed, 1.0)

    moments = [[0, 0, 0, 0, 0, 2 * PLAIN]]
    forecast = Forecast(moments, [Segment()], cards.card("8GiB").rates, 0, 1.0)
    plans = [*Search(names, 2 * PLAIN, PLAIN, RunsAhead(attempt), 1.0, forecast).found()]
    if wrong:
        assert plans[0] == {"loss head"}
    else:
        assert not plans and len(asked) <= len(names) + 3
