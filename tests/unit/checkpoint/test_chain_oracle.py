"""The solver against exhaustive search and against the paper's recurrence (tests/reference/chain_oracle.py), on the
families of benchmarks/chain_families.py."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest

from benchmarks import chain_families
from benchmarks.chain_families import FAMILIES, IRREGULAR
from memopt.chain import LEVELS, Chain, InfeasibleBudget, Stage, Table, solve
from tests.reference import chain_oracle
from tests.reference.chain_oracle import Sizes

SEED = int(os.environ.get("MEMOPT_SEED", "1"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
ROUNDING = 1e-5  # seconds are compared in single precision


def saved(chain: Chain) -> int:
    return sum(stage.saved_bytes for stage in chain.stages)


def seconds(chain: Chain, budget: int, level: str, slots: int = 500) -> float:
    """Of the schedule, which is replayed apart; inf: none fits, and then the least budget is checked instead."""
    try:
        schedule = solve(chain, budget, slots, level=level)
    except InfeasibleBudget as error:
        assert error.least_budget > budget
        schedule = solve(chain, error.least_budget, slots, level=level)
        assert schedule.peak_bytes == error.least_budget
        assert chain_oracle.replay(chain, schedule.ops)[1] == error.least_budget
        return math.inf
    assert chain_oracle.replay(chain, schedule.ops) == pytest.approx((schedule.seconds, schedule.peak_bytes))
    assert schedule.peak_bytes <= budget
    return schedule.seconds


def compare(chain: Chain, budget: int) -> tuple[float, dict[str, float]]:
    """The true optimum, and each level's; what must hold of any chain is asserted."""
    sizes = Sizes(chain)
    best = chain_oracle.exhaustive(sizes, budget)
    found = {level: seconds(chain, budget, level) for level in LEVELS}
    assert found["persistent"] == pytest.approx(chain_oracle.persistent(sizes, budget))
    assert best <= found["full"] * (1 + ROUNDING)
    assert found["full"] <= found["default"] * (1 + ROUNDING)
    assert found["default"] <= found["persistent"] * (1 + ROUNDING)
    return best, found


def pairs(r: random.Random, count: int, stages: tuple[int, int]):
    """Chains of all families and budgets that something fits."""
    while count:
        family = r.choice(list(FAMILIES))
        chain = FAMILIES[family](r, r.randint(*stages))
        budget = int(saved(chain) * r.uniform(0.25, 0.8))
        best, found = compare(chain, budget)
        if best < math.inf:
            count -= 1
            yield family, chain, budget, best, found


def test_no_schedule_is_better_than_the_best_and_levels_are_in_order():
    for _ in pairs(random.Random(SEED), 2000 if SOAK else 25, (3, 7) if SOAK else (3, 5)):
        pass


def test_most_schedules_are_the_best_there_are(capsys: pytest.CaptureFixture[str]):
    """The same chains every time: shares of a sample are not for every seed."""
    count = 1000 if SOAK else 60
    losses: dict[str, list[float]] = {level: [] for level in LEVELS}
    for family, chain, budget, best, found in pairs(random.Random(6), count, (3, 7) if SOAK else (3, 6)):
        for level in LEVELS:
            if found[level] > best * (1 + ROUNDING):
                losses[level].append(found[level] / best - 1)
                if level != "persistent":
                    with capsys.disabled() if SOAK else capsys:
                        n = len(chain.stages)
                        print(
                            f"\n{level}: {family}, {n} stages, budget {budget}: {found[level] / best - 1:.1%} above"
                        )
    assert len(losses["default"]) <= 0.05 * count
    assert len(losses["full"]) <= 0.01 * count
    assert len(losses["persistent"]) >= 0.2 * count  # else the sample would say nothing


def test_with_options_too():
    r = random.Random(SEED)
    for _ in range(300 if SOAK else 12):
        family = r.choice(list(FAMILIES))
        chain = chain_families.with_options(r, FAMILIES[family](r, r.randint(2, 4)), r.randint(2, 3))
        compare(chain, int(saved(chain) * r.uniform(0.2, 0.8)))


def test_with_inputs_put_away_too():
    r, count, away = random.Random(SEED), 300 if SOAK else 25, 0
    for _ in range(count):
        chain = FAMILIES[r.choice(list(FAMILIES))](r, r.randint(4, 6 if SOAK else 5))
        chain = chain_families.with_inputs_put_away(r, chain)
        least = Table(chain, saved(chain)).least_budget
        budget = r.randint(least, max(least, saved(chain) * 2 // 3))
        compare(chain, budget)
        away += any(op == "put_input" for op, *_ in solve(chain, budget).ops)
    assert away >= count // 8  # else the sample would say nothing


def test_at_the_least_budget_inputs_that_are_put_away_need_not_be_made_again():
    plain = [Stage(10, 4, 1.0, 2.0) for _ in range(12)]
    puts = [replace(stage, put_input_seconds=0.0, get_input_seconds=0.1) for stage in plain]
    stay, away = Chain(tuple(plain), 4), Chain(tuple(puts), 4)
    budget = Table(away, 0).least_budget
    assert budget == Table(stay, 0).least_budget
    # Each stage runs twice, but for the last one; of twelve inputs the caller has one.
    assert solve(away, budget).seconds <= 12 * 3 + 11 + 11 * 0.1 + 1e-4 < solve(stay, budget).seconds / 1.5


def test_a_long_chain_is_no_slower_than_the_persistent_optimum():
    r = random.Random(SEED)
    for _ in range(40 if SOAK else 4):
        family = r.choice(list(FAMILIES))
        chain = FAMILIES[family](r, r.randint(12, 20))
        budget = int(saved(chain) * r.uniform(0.1, 0.6))
        reference = chain_oracle.persistent(Sizes(chain), budget)
        assert seconds(chain, budget, "persistent") == pytest.approx(reference)
        assert seconds(chain, budget, "default") <= reference * (1 + ROUNDING)


def test_irregular_chains_gain_two_per_cent_near_the_least_budgets():
    """Twenty to fifty stages, budgets of the least and 5 and 10 % of the way to keeping all; the same every time."""
    r, gains = random.Random(6), []
    for _ in range(10 if SOAK else 2):
        for family in IRREGULAR:
            chain = FAMILIES[family](r, r.randint(20, 50 if SOAK else 30))
            table = Table(chain, saved(chain), level="persistent")
            for way in (0.0, 0.05, 0.1):
                budget = int(table.least_budget + way * (saved(chain) - table.least_budget))
                plain = seconds(chain, budget, "persistent")
                gains.append(plain / seconds(chain, budget, "default") - 1)
    assert min(gains) >= -ROUNDING
    assert sum(gains) / len(gains) >= 0.02


def test_where_sizes_are_rounded_to_slots_the_peak_keeps_the_budget_in_bytes():
    r = random.Random(SEED)
    for _ in range(300 if SOAK else 40):
        family = r.choice(list(FAMILIES))
        chain = chain_families.in_units(FAMILIES[family](r, r.randint(3, 12)), 1_000_003)
        budget = int(saved(chain) * r.uniform(0.2, 0.9)) + 1
        slots = r.choice((7, 20, 100, 500))
        for level in LEVELS:
            seconds(chain, budget, level, slots)
