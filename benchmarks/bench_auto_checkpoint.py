"""The promises of memopt.auto_checkpoint about a step: its peak, its memory as the machine sees it, its time.

Six models, seven budgets each, from just feasible to just below the plain step; a fresh process for each row. Live
bytes are measured in a step at torch's allocator, what kernels take to work in among them; peak RSS is the kernel's
highest mark (VmHWM) of the first step, less RSS before it. glibc keeps freed memory and its threshold for what it maps
by itself grows with what is freed; so that RSS is what is used, the rows run with MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ at 64 KiB. Planning has run the model before: what libraries allocate once is there before the
step. A plan's peak is foretold from its stages' bytes; its seconds are those of the steps that tried it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402
from benchmarks.round_log import LineLog  # noqa: E402

FAMILIES = ("conv chain", "GPT", "ViT", "residual CNN", "perceptron", "encoder")
BUDGETS = 7
MIB = 1 << 20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
RSS_SHARE, RSS_MORE = 1.10, 64 * MIB
PREDICTED_BYTES, PREDICTED_SECONDS = 3.0, 10.0  # percent
RISE = 8.0  # MiB by which peak RSS may rise where the budget falls: pages, threads' arenas


# ---- in the process of a row -------------------------------------------------------------------------------------


def memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def survey(family: str, small: bool) -> dict[str, Any]:
    """The plain peak and the least budget."""
    from benchmarks import checkpoint_models
    from memopt import auto_checkpoint
    from memopt.chain import InfeasibleBudget

    work = checkpoint_models.make(family, small=small)
    plain = work.live_peak()
    try:
        auto_checkpoint(work.model, work.sample, memory_budget=1, loss=work.loss)
    except InfeasibleBudget as error:
        return {"plain": plain, "least": error.least_budget}
    raise AssertionError("a budget of 1 byte is none")


def row(family: str, budget: int, small: bool) -> dict[str, Any]:
    import ctypes

    import torch

    from benchmarks import checkpoint_models
    from memopt import auto_checkpoint

    work = checkpoint_models.make(family, small=small)
    auto_checkpoint(work.model, work.sample, memory_budget=budget, loss=work.loss)
    plan = vars(work.model)["plan"]
    torch.manual_seed(1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is RSS from here on
    before = memory("VmRSS")
    work.step()
    most = memory("VmHWM")
    seconds = []
    for _ in range(3 if small else 6):
        start = time.perf_counter()
        work.step()
        seconds.append(time.perf_counter() - start)
    return {
        "budget": budget,
        "predicted": plan.predicted_bytes,
        "live": work.live_peak(),
        "standing": work.standing_bytes(),
        "rss": most - before,
        "trial_seconds": plan.seconds,
        "seconds": statistics.median(seconds),
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "runs": len([op for op, *_ in plan.schedule.ops if op.startswith("f")]),
        "stages": len(plan.stages) + 1,
    }


def child(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    size = ["--small"] if options.quick else []
    log = None
    if options.resume:
        log = LineLog(
            harness.RESULTS / "rounds" / "bench_auto_checkpoint.rows.jsonl", {"small": options.quick}
        )
        if not log.header:
            log.begin()
    done = {(line["family"], line["n"]): line["found"] for line in (log.lines if log else ())}

    def find(family: str, n: int, arguments: list[str]) -> dict[str, Any]:
        if (family, n) not in done:
            done[family, n] = child([*arguments, *size])
            if log:
                log.add({"family": family, "n": n, "found": done[family, n]})
        return done[family, n]

    table: dict[str, list[dict[str, Any]]] = {}
    for family in options.families:
        ends = find(family, -1, ["--survey", family])
        between = (ends["plain"] - 1 - ends["least"]) / (BUDGETS - 1)
        table[family] = []
        for n in range(BUDGETS):
            budget = int(ends["least"] + n * between)
            found = find(family, n, ["--row", family, str(budget)])
            table[family].append({**found, "plain": ends["plain"]})
    return table


def text(table: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"{'':<14}{'plain':>8}{'budget':>8}{'live':>8}{'predicted':>10}{'off':>7}{'RSS more':>10}{'standing':>10}"
        f"{'a step':>10}{'in trials':>11}{'off':>7}{'spread':>8}   MiB, s; runs of stages"
    ]
    for family, rows in table.items():
        for r in rows:
            lines.append(
                f"{family:<14}{r['plain'] / MIB:>8.1f}{r['budget'] / MIB:>8.1f}{r['live'] / MIB:>8.1f}"
                f"{r['predicted'] / MIB:>10.1f}{off(r, 'predicted', 'live'):>+7.1%}{r['rss'] / MIB:>10.1f}"
                f"{r['standing'] / MIB:>10.1f}{r['seconds']:>10.3f}{r['trial_seconds']:>11.3f}"
                f"{off(r, 'trial_seconds', 'seconds'):>+7.1%}{r['spread']:>8.0%}   {r['runs']} of {r['stages']}"
            )
    return "\n".join(lines)


def off(found: dict[str, Any], predicted: str, measured: str) -> float:
    return float(found[predicted] / found[measured] - 1)


def promises(report: harness.Report, table: dict[str, list[dict[str, Any]]]) -> None:
    rows = [found for family in table.values() for found in family]
    live = max(r["live"] / r["budget"] for r in rows)
    report.record(
        "live bytes, the row nearest its budget", {"budget": 1.0, "measured": live}, unit="budgets", goal=1.0
    )
    rss = max(r["rss"] / (RSS_SHARE * r["budget"] + RSS_MORE) for r in rows)
    report.record(
        "peak RSS of the first step less RSS before it, the row nearest its bound",
        {"budget + 10 % + 64 MiB": 1.0, "measured": rss},
        unit="bounds",
        goal=1.0,
    )
    pairs = [(family[n], family[n + 1]) for family in table.values() for n in range(len(family) - 1)]
    rise = max((low["rss"] - high["rss"]) / MIB for low, high in pairs)
    report.record(
        "peak RSS of the first step, most by which it rises where the budget falls",
        {"allowed": RISE, "measured": max(rise, 0.0)},
        unit="MiB",
        goal=1.0,
    )
    for case, predicted, measured, allowed in (
        ("predicted peak, furthest from the measured one", "predicted", "live", PREDICTED_BYTES),
        (
            "seconds of the trial steps, furthest from later ones",
            "trial_seconds",
            "seconds",
            PREDICTED_SECONDS,
        ),
    ):
        errors = [100 * abs(off(r, predicted, measured)) for r in rows]
        report.record(case, {"allowed": allowed, "measured": max(errors)}, unit="%", goal=1.0)
        report.record(
            f"{case}: the median row", {"allowed": allowed, "measured": statistics.median(errors)}, unit="%"
        )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="some of the models"
    )
    parser.add_argument("--survey", help=argparse.SUPPRESS)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.survey or options.row:
        import torch

        torch.set_num_threads(2)
        found = (
            survey(options.survey, options.small)
            if options.survey
            else row(options.row[0], int(options.row[1]), options.small)
        )
        print(json.dumps(found))
        return 0
    if options.cuda:
        raise SystemExit("bench_auto_checkpoint measures this process's memory: leave --cuda out")
    report = harness.Report(
        "bench_auto_checkpoint", options, claim="auto_checkpoint: peaks within the budget, as predicted"
    )
    table = measure(options)
    report.note("malloc", MALLOC)
    report.note("rows", table)
    promises(report, table)
    print(text(table), end="\n\n", file=sys.stderr if options.json else sys.stdout)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
