"""The allocator on training loops that it was not tuned on: 39 traces of the workloads with other sizes and other data.

Each is recorded from PyTorch's real modules and optimizers on memopt's simulated device (record_trace.py) and replayed
by `python -m memopt replay --lazy --frontier`, the host a step ahead, with double_map and without:

    frontier   the smallest device that completes the trace, over the live peak
    held       the most that is held where there is plenty, over the live peak

Trace i is drawn by random.Random(i), all draws evenly by the logarithm:

    0 to 26    workload i % 9. Widths, depths, batches, vocabularies and resolutions are each multiplied by a factor of
               their own from 0.75 to 1.33, and all of them by one from 0.6 to 1.1; 8 to 20 steps
    27 to 38   two different workloads, each drawn so, one after the other in one process, 5 to 10 steps of each

The workload's own draws (lengths, routing, graphs) come from a generator seeded with 1000 + i. A trace whose live peak
is below 1 GiB is recorded again with all sizes a quarter larger. None is left out of the figures.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable  # workloads need torch, and torch memopt.sim.activate() before

TRACES, SINGLE = 39, 27
LEAST = 1 << 30  # bytes of live peak
MEMORY = "300GiB"
WORST, MEAN = 1.02, 1.006  # frontier, of the live peak
MODES = {
    "double_map": ([], 1.02),
    "no double_map": (["--no-double-map"], 1.06),
}  # and the mean of what is held


def evenly(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


@dataclass
class Drawn:
    """A workload's sizes: each `full` size has its own factor, the same wherever the workload asks for it."""

    name: str
    steps: int
    scale: float
    draw: random.Random
    factors: dict[tuple[int, int], float] = field(default_factory=dict)

    def size(self, full: int, multiple: int = 1) -> int:
        factor = self.factors.setdefault((full, multiple), evenly(self.draw, 0.75, 1.33))
        return max(1, round(full * factor * self.scale / multiple)) * multiple


def drawn(number: int, names: list[str], larger: float) -> list[Drawn]:
    draw = random.Random(number)
    alone = number < SINGLE
    chosen = [names[number % len(names)]] if alone else draw.sample(names, 2)
    steps = (8, 20) if alone else (5, 10)
    return [
        Drawn(name, draw.randint(*steps), larger * evenly(draw, 0.6, 1.1), random.Random(f"{number} {name}"))
        for name in chosen
    ]


def record(number: int, larger: float, path: Path) -> None:
    """In a process of its own: draws a trace, records it, and prints what it is."""
    from memopt import sim

    sim.activate(memory=MEMORY, blank=True)
    import torch

    from benchmarks.record_trace import record_run
    from benchmarks.workloads import WORKLOADS, Loop

    torch.set_num_threads(1)
    parts = drawn(number, list(WORKLOADS), larger)

    class Sized(Loop):
        sizes: Drawn

        def size(self, full: int, multiple: int = 1) -> int:
            return self.sizes.size(full, multiple)

    def run(step_done: Callable[[int], None]) -> None:
        torch.manual_seed(number)
        generator = torch.Generator().manual_seed(1000 + number)
        for part in parts:
            loop = Sized(part.steps, part.scale, step_done, generator)
            object.__setattr__(loop, "sizes", part)
            WORKLOADS[part.name].train(loop)

    trace = record_run(run)
    path.write_text("\n".join(trace.lines) + "\n")
    what = [f"{part.name}, scale {part.scale:.2f}, {part.steps} steps" for part in parts]
    print(json.dumps({"what": what, "requests": trace.ids, "live_peak": trace.live_peak}))


def replay(path: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "memopt", "replay", "--json", "--steps", "--lazy", *options, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(number: int, folder: Path) -> dict[str, Any]:
    path, larger = folder / f"{number}.txt", 1.0
    while True:
        command = [sys.executable, __file__, "--record", str(number), str(larger), str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if found["live_peak"] >= LEAST:
            break
        larger *= 1.25
    live = found["live_peak"]
    for mode, (options, _) in MODES.items():
        run = replay(path, "--frontier", *options)
        found[mode] = {
            "frontier": run["frontier"] / live,
            "held": run["peak_reserved"] / live,
            "moved a step at the frontier": run["at_frontier"]["granules_moved_per_step_mean"],
            "calls of the last step at the frontier": run["at_frontier"]["driver_calls_last_step"],
            "host waits at the frontier": run["at_frontier"]["host_waits"],
        }
    path.unlink()
    print(number, found, file=sys.stderr, flush=True)
    return found


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        record(int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
        return 0
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_alloc_traces", options)
    numbers = range(0, TRACES, 13 if options.quick else 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        traces = list(
            pool.map(lambda number: measure(number, Path(folder)), numbers)
        )  # nothing is timed here
    report.note("traces", traces)
    for mode, (_, held_limit) in MODES.items():
        frontiers = [trace[mode]["frontier"] for trace in traces]
        held = [trace[mode]["held"] for trace in traces]
        report.note(
            f"beyond {WORST} at the frontier, {mode}",
            [trace["what"] for trace, value in zip(traces, frontiers, strict=True) if value > WORST],
        )
        for case, limit, value in (
            ("frontier, worst", WORST, max(frontiers)),
            ("frontier, mean", MEAN, statistics.mean(frontiers)),
            ("held, mean", held_limit, statistics.mean(held)),
        ):
            values = {"limit": limit, "memopt": value}
            report.record(f"{case}, {mode}", values, unit="of the live peak", peer="limit", goal=1.0)
        report.record(f"held, worst, {mode}", {"memopt": max(held)}, unit="of the live peak")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
