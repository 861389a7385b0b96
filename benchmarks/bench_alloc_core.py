"""The host's cost of a request: alloc and free in the allocator's core, and torch.empty and del from Python.

A C program (alloc_core.c, which make compiles as the extension is) times the core on the model device, whose calls take
no time. Three patterns:

    again      a block, and its free at once
    replace    any one of the live blocks is freed, and one of its size made: nothing of it is in the cache
    step       1024 blocks; every other dies young, the rest in reverse; again and again

with 1,000 and 100,000 blocks live beside them, in one thread and in eight that share the pool, the trace ring off and
on. malloc, in the same program by turns, is a yardstick and no peer: it knows no streams and keeps no statistics. Times
of one thread are its CPU time, of eight the wall's; p50 and p99 are of single pairs, by the processor's own clock.

Goals are asked of the best round: what a busy machine adds is not the allocator's. From Python the peer is PyTorch's
own allocator, on the simulated device, in a process of its own; there the median of the rounds counts, and memopt must
not be slower.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import bench_alloc_train, harness  # noqa: E402

BINARY = "build/c/bench/alloc_core"
OFF, ON = "memopt", "memopt, ring on"
CONTENDERS = ("malloc", OFF, ON)
PATTERNS = ("again", "replace", "step")
LIVE = (1_000, 100_000)
THREADS = (1, 8)
PAIR_LIMIT, P99_LIMIT, EVENT_LIMIT = 150, 1000, 100  # nanoseconds


class Core:
    """alloc_core with a pattern: its answers to what alloc_core.c says can be asked."""

    def __init__(self, pattern: str, live: int, threads: int, seed: int = 1) -> None:
        self.process = subprocess.Popen(
            [str(ROOT / BINARY), pattern, str(live), str(threads), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> list[float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"alloc_core ended with status {self.process.wait()} at {question!r}")
        return [float(word) for word in answer.split()]

    def pair(self, contender: str, pairs: int) -> float:
        """Nanoseconds of an alloc and its free."""
        return self.ask(f"time {pairs} {contender}")[0]

    def close(self) -> None:
        self.process.communicate()


def build() -> None:
    done = subprocess.run(["make", "-s", BINARY], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench_alloc_core: make {BINARY} failed:\n{done.stdout}{done.stderr}")


def within(report: harness.Report, case: str, limit: float, value: float, unit: str = "ns") -> None:
    report.record(f"goal: {case}", {"limit": limit, "memopt": value}, unit=unit, peer="limit", goal=1.0)


def measure(report: harness.Report, pattern: str, live: int, threads: int, pairs: int) -> None:
    case = f"{pattern}, {live:,} live, {threads} thread{'s' if threads > 1 else ''}"
    core = Core(pattern, live, threads)

    class Turn:
        def __init__(self, contender: str) -> None:
            self.contender = contender

        def __call__(self) -> None:
            raise AssertionError("timed in its own process, by the clock")

    def clock_of_alloc_core(run: object, calls: int) -> float:
        assert isinstance(run, Turn)
        return core.pair(run.contender, calls) * 1e-9 * calls

    for contender in CONTENDERS:  # every granule is mapped, every table has its size
        core.pair(contender, pairs)
    before = core.ask(f"calls {OFF}")[0]
    found = report.compare(
        f"alloc and free, {case}",
        {contender: Turn(contender) for contender in CONTENDERS},
        peer="malloc",
        calls=pairs,
        clock=clock_of_alloc_core,
    )
    spreads = [
        {contender: core.ask(f"each {pairs} {contender}") for contender in CONTENDERS}
        for _ in range(report.rounds)
    ]
    calls = core.ask(f"calls {OFF}")[0] - before
    core.close()

    least = {}
    for number, name in enumerate(("p50", "p99", "p99.9")):
        by_contender = {
            contender: [spread[contender][number] for spread in spreads] for contender in CONTENDERS
        }
        report.record(
            f"{name} of single pairs, {case}, median round",
            {contender: statistics.median(values) for contender, values in by_contender.items()},
            unit="ns",
            peer="malloc",
        )
        least[name] = min(by_contender[OFF])
    report.note(f"calls of the device while timed, {case}", calls)
    if threads > 1:
        return
    best = {contender: found.seconds(contender).best * 1e9 for contender in CONTENDERS}
    if live == min(LIVE) and pattern != "replace":
        within(report, f"a warm pair, {case}", PAIR_LIMIT, best[OFF])
    if live == max(LIVE):
        within(report, f"p99, {case}", P99_LIMIT, least["p99"])
    # A pair is two events. Each round by itself: both of its sides saw the same machine.
    added = statistics.median((turn.seconds[ON] - turn.seconds[OFF]) * 1e9 / 2 for turn in found.rounds)
    within(report, f"an event in the ring, {case}", EVENT_LIMIT, added)


def report_core(
    report: harness.Report, patterns: Iterable[str], lives: Iterable[int], threads: Iterable[int], pairs: int
) -> None:
    build()
    counts = list(threads)
    for live in lives:
        for pattern in patterns:
            for count in counts:
                bench_alloc_train.say(f"{pattern}, {live:,} live, threads: {count}")
                measure(report, pattern, live, count, pairs)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, help="all three")
    parser.add_argument("--live", nargs="+", type=int, default=LIVE, help="blocks (1000 100000)")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS, help="(1 8)")
    parser.add_argument("--pairs", type=int, default=300_000, help="of a sample (300000)")
    parser.add_argument("--only", choices=["core", "python"], help="one half of it")
    options: argparse.Namespace = parser.parse_args()
    if options.cuda:
        parser.error("this measures the host alone; bench_alloc_gpu.py is the one for a GPU")
    if options.quick:
        options.pairs = min(options.pairs, 30_000)
    if options.only != "core":
        from memopt import sim

        sim.activate(memory=bench_alloc_train.PLENTY, blank=True)
        try:
            import torch
        except ImportError as error:
            parser.error(f"torch.empty cannot be timed here ({error}); --only core needs no torch")
        if not torch.backends.cuda.is_built():
            parser.error("this torch is a CPU build; `python3 tests/environments.py sim` makes an environment"
                         " whose Python has the other; --only core needs no torch")  # fmt: skip

    report = harness.Report("bench_alloc_core", options)
    report.note("pairs of a sample", options.pairs)
    report.note("device", "the model device for the core, the simulated device for torch")
    if options.only != "python":
        report_core(report, options.patterns, options.live, options.threads, options.pairs)
    if options.only != "core":
        bench_alloc_train.report_host_time(report, ["native", "memopt"], goal=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
