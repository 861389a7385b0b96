"""The solver beside the greedy rule of torchtitan's memory policies and of torch's partitioner (greedy_knapsack):
activations that take the longest to make again for their bytes are kept, for as long as the budget lasts, and the rest
is made again. One cost model has both: a chain's, in which memopt.chain replays schedules."""

from __future__ import annotations

import os
import random
import statistics

import pytest

from benchmarks.chain_families import FAMILIES, IRREGULAR
from memopt.chain import Chain, InfeasibleBudget, Op, Schedule, solve

SEED = int(os.environ.get("MEMOPT_SEED", "1"))
CHAINS = 40  # of a family
SHARES = (0.3, 0.4, 0.5)  # of the plain peak
ROUNDING = 1e-5  # seconds are compared in single precision


def schedule_keeping(chain: Chain, kept: set[int]) -> Schedule:
    """Return the step in which the other stages keep their input alone, and run again right before their backward."""
    loss = len(chain.stages) - 1
    ops: list[Op] = [("fall" if k in kept or k == loss else "fck", k) for k in range(loss + 1)]
    for k in reversed(range(loss + 1)):
        if k not in kept and k != loss:
            ops.append(("fall", k))
        ops.append(("bwd", k))
    return Schedule(chain, ops)


def greedy(chain: Chain, budget: int) -> Schedule | None:
    """Return the greedy rule's step: the cheapest stages to make again for what they free go, until it fits."""
    kept = set(range(len(chain.stages) - 1))

    def cheapness(k: int) -> float:
        stage = chain.stages[k]
        return stage.forward_seconds / max(stage.saved_bytes - stage.output_bytes, 1e-9)

    for k in [None, *sorted(kept, key=cheapness)]:
        kept -= {k}
        found = schedule_keeping(chain, kept)
        if found.peak_bytes <= budget:
            return found
    return None


def gains(family: str, seed: int) -> tuple[list[float], int]:
    """Return what the greedy rule takes longer by, of each budget that it fits; and how many it alone does not fit."""
    r = random.Random(seed)
    found, more = [], 0
    for _ in range(CHAINS):
        chain = FAMILIES[family](r, r.randint(8, 20))
        plain = schedule_keeping(chain, set(range(len(chain.stages)))).peak_bytes
        for share in SHARES:
            other = greedy(chain, int(share * plain))
            try:
                mine = solve(chain, int(share * plain))
            except InfeasibleBudget:
                assert other is None
                continue
            assert mine.peak_bytes <= int(share * plain)
            if other is None:
                more += 1
                continue
            assert mine.seconds <= other.seconds * (1 + ROUNDING)
            found.append(other.seconds / mine.seconds - 1)
    return found, more


@pytest.mark.parametrize("seed", [1, SEED], ids=["fixed", "fresh"])
def test_the_solver_is_never_slower_and_on_unequal_chains_faster_than_the_greedy_rule(seed: int) -> None:
    unequal: list[float] = []
    for family in FAMILIES:
        found, more = gains(family, seed)
        if found:
            print(
                f"seed {seed}, {family}: the greedy rule takes {statistics.median(found):.1%} longer in the median of "
                f"{len(found)} budgets, {min(found):.1%} to {max(found):.1%}; it does not fit {more} that memopt fits"
            )
        if family in IRREGULAR:
            unequal += found
    assert unequal and statistics.median(unequal) >= 0.05
