"""The solver of memopt.chain: how long it takes, how often it finds the best schedule there is, and what that is worth.

Time: `memopt.chain.solve` as it is called, of irregular chains with 500 slots, in CPU time (it has one thread).
Optimal: random chains of 3 to 7 stages, 8 families (chain_families.py), budgets of 25 to 80 % of what is saved, against
exhaustive search. Gain: chains of 20 to 50 stages at the least feasible budget and 5 and 10 % of the way from there to
what is saved in all. Ways: the seconds of a step by torch's ways of checkpointing and by the solver's, in one budget;
and where inputs can be put off the device too, beside their stage's run, and back in half of its forward's time.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import chain_families, harness  # noqa: E402
from benchmarks.chain_families import FAMILIES, IRREGULAR  # noqa: E402
from memopt.chain import LEVELS, Chain, InfeasibleBudget, Op, Schedule, Table, solve  # noqa: E402
from tests.reference import chain_oracle  # noqa: E402

SECONDS = {100: 0.02, 200: 0.25}  # the default level's, at most
OPTIONS, OPTIONS_COST = 4, 6  # a stage; at most this many times as long
INPUTS_COST = 6
OPTIMAL = {"default": 5.0, "full": 1.0}  # per cent that may miss the optimum
GAIN = 1.02
SEED = 6
UNIT = 1_000_003  # bytes of a size 1: so that sizes are rounded to slots


def cpu_clock(run: Callable[[], object], calls: int) -> float:
    """Seconds of this process's own work."""
    start = time.process_time_ns()
    for _ in range(calls):
        run()
    return (time.process_time_ns() - start) * 1e-9


def saved(chain: Chain) -> int:
    return sum(stage.saved_bytes for stage in chain.stages)


def with_inputs_away(chain: Chain) -> Chain:
    """The same chain, whose inputs can be put off the device."""
    stages = [
        replace(s, put_input_seconds=0.0, get_input_seconds=s.forward_seconds / 2) for s in chain.stages
    ]
    return replace(chain, stages=tuple(stages))


def between(chain: Chain, way: float) -> int:
    """A budget: that part of the way from the least feasible one to what is saved in all."""
    least = Table(chain, 0, level="persistent").least_budget
    return int(least + way * (saved(chain) - least))


def seconds(chain: Chain, budget: int, level: str) -> float:
    """inf where nothing fits."""
    try:
        schedule = solve(chain, budget, level=level)
    except InfeasibleBudget:
        return math.inf
    schedule.validate()
    return schedule.seconds


# ---- time ------------------------------------------------------------------------------------------------------------


def time_it(report: harness.Report) -> None:
    for n, limit in SECONDS.items():
        r = random.Random(SEED)
        chain = chain_families.in_units(chain_families.plain(r, n), UNIT)
        more = chain_families.with_options(r, chain, OPTIONS)
        away = with_inputs_away(chain)
        budget = between(chain, 0.3)
        case = f"{n} stages, 500 slots"
        found = report.compare(
            case,
            {
                "persistent": lambda c=chain, b=budget: solve(c, b, level="persistent"),
                "default": lambda c=chain, b=budget: solve(c, b),
                f"default, {OPTIONS} options": lambda c=more, b=budget: solve(c, b),
                "default, inputs put away": lambda c=away, b=budget: solve(c, b),
            },
            calls=1,
            clock=cpu_clock,
        )
        one = found.seconds("default").best
        limits = {"limit": limit * 1e3, "memopt": one * 1e3}
        report.record(f"best of {case}, and the limit", limits, unit="ms", goal=1.0)
        times = {
            "limit": float(OPTIONS_COST),
            "memopt": found.seconds(f"default, {OPTIONS} options").best / one,
        }
        report.record(f"{OPTIONS} options a stage for one, {case}", times, unit="times as long", goal=1.0)
        times = {
            "limit": float(INPUTS_COST),
            "memopt": found.seconds("default, inputs put away").best / one,
        }
        report.record(f"inputs that can be put away, {case}", times, unit="times as long", goal=1.0)


# ---- how often it is optimal -----------------------------------------------------------------------------------------


def feasible_pairs(count: int) -> Iterator[tuple[str, Chain, int, float]]:
    r = random.Random(SEED)
    while count:
        family = r.choice(list(FAMILIES))
        chain = FAMILIES[family](r, r.randint(3, 7))
        budget = int(saved(chain) * r.uniform(0.25, 0.8))
        best = chain_oracle.exhaustive(chain_oracle.Sizes(chain), budget)
        if best < math.inf:
            count -= 1
            yield family, chain, budget, best


def compare_with_exhaustive_search(report: harness.Report, count: int) -> None:
    losses: dict[str, list[dict[str, object]]] = {level: [] for level in LEVELS}
    for family, chain, budget, best in feasible_pairs(count):
        for level in LEVELS:
            took = seconds(chain, budget, level)
            if took > best * (1 + 1e-5):
                above = f"{took / best - 1:.2%}" if took < math.inf else "none found"
                loss = {"family": family, "stages": len(chain.stages), "budget": budget, "above": above}
                losses[level].append(loss)
    if not report.options.json:
        for level in OPTIMAL:
            for loss in losses[level]:
                print(f"{level}:", ", ".join(f"{key} {value}" for key, value in loss.items()))
    for level, most in OPTIMAL.items():
        missed = {"limit": most, level: 100 * len(losses[level]) / count}
        missed["persistent"] = 100 * len(losses["persistent"]) / count
        case = f"{count} chains of 3 to 7 stages: share that misses the optimum, {level} level"
        persistent = missed.pop("persistent")
        report.record(case, missed, unit="%", peer="limit", goal=1.0)
        report.note(f"{level}: losses on the rest", losses[level])
    report.note("persistent misses the optimum, %", persistent)


# ---- what it is worth ------------------------------------------------------------------------------------------------


def gain_over_persistent(report: harness.Report, chains: int) -> None:
    r = random.Random(SEED)
    by_family: dict[str, list[float]] = {}
    for _ in range(chains):
        for family in IRREGULAR:
            chain = FAMILIES[family](r, r.randint(20, 50))
            for budget in (between(chain, way) for way in (0.0, 0.05, 0.1)):
                ratio = seconds(chain, budget, "persistent") / seconds(chain, budget, "default")
                by_family.setdefault(family, []).append(ratio)
    ratios = [ratio for family in by_family.values() for ratio in family]
    mean = statistics.mean(ratios)
    values = {"persistent": 1.0, "memopt": 1 / mean}
    case = f"{len(ratios)} irregular chains of 20 to 50 stages near the least budget: seconds of a step, mean"
    report.record(case, values, unit="of persistent's", goal=GAIN)
    report.note("gain over persistent by family", {f: statistics.mean(x) - 1 for f, x in by_family.items()})
    report.note("gain over persistent, least and most", [min(ratios) - 1, max(ratios) - 1])


# ---- beside torch's ways ---------------------------------------------------------------------------------------------


def sequential(chain: Chain, segments: int) -> Schedule:
    """torch.utils.checkpoint.checkpoint_sequential: equal segments; all but the last, which takes the rest, run without
    keeping anything and are made again as a whole."""
    n = len(chain.stages)
    size = n // segments
    starts = [size * k for k in range(segments)]
    parts = [range(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]
    ops: list[Op] = []
    for part in parts[:-1]:
        ops += [("fck", part[0]), *(("fnone", i) for i in part[1:])]
    for part in reversed(parts):
        ops += [("fall", i) for i in part] + [("bwd", i) for i in reversed(part)]
    return Schedule(chain, ops)


def ways(report: harness.Report) -> None:
    for family in ("conv pyramid", "attention/MLP", "random"):
        chain = FAMILIES[family](random.Random(SEED), 24)
        cut = [sequential(chain, k) for k in range(2, 25)]
        least, plain = min(schedule.peak_bytes for schedule in cut), chain.plain_seconds
        for way in (0.0, 0.2, 0.5):
            budget = int(least + way * (chain.keep_all().peak_bytes - least))
            values = {
                "checkpoint_sequential, best": min(s.seconds for s in cut if s.peak_bytes <= budget) / plain,
                "persistent": seconds(chain, budget, "persistent") / plain,
                "memopt": seconds(chain, budget, "default") / plain,
                "memopt, inputs put away": seconds(with_inputs_away(chain), budget, "default") / plain,
            }
            case = f"{family}, 24 stages, budget {budget} of {chain.keep_all().peak_bytes}: seconds of a step"
            report.record(case, values, unit="of a plain step's")


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    if options.cuda:
        raise SystemExit("bench_solver: the solver runs on the CPU; leave --cuda out")
    report = harness.Report("bench_solver", options, claim=__doc__.partition("\n")[0])
    time_it(report)
    gain_over_persistent(report, 2 if options.quick else 20)
    ways(report)
    compare_with_exhaustive_search(report, 60 if options.quick else 1000)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
