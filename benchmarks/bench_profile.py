"""The cost of looking at memory: memopt.enable() and a recording, of a CPU step and of an allocation.

A CPU step is the demo task's (gpt, small), forward, backward and optimizer: plain, after memopt.enable(), and while the
recorder runs, which on a CPU sees every operation.

An allocation is one of 2000 that 200 modules ask for, 10 each, in a stack some 20 frames deep, on the simulated device,
whose own work takes next to nothing: without any history, under torch's own history with Python stacks, as torch
has it by default and with what the recorder asks of it (stacks of allocations alone), and while the recorder runs,
which also knows which module does. So with torch's allocator, and in a process of its own with memopt's, whose history
answers the same names. What each adds is given in ns an allocation and as a share of a step of 50 ms with 2000
allocations: of a step on a GPU that is not waited for, the host's time.

Of an allocation the best rounds are compared, in processor time: what a busy machine adds is not the recorder's.

Goals: enable() under 1 %, a recording under 5 %.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memopt import sim  # noqa: E402

if __name__ == "__main__":
    sim.activate(memory="2GiB")

import argparse  # noqa: E402
import subprocess  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import memopt  # noqa: E402
from benchmarks import harness, tasks  # noqa: E402

MODULES, REQUESTS, ENTRIES = 200, 10, 200_000
STEP_MS = 50
ENABLED, RECORDED = "memopt.enable()", "recorded"
TORCHS, LEAN = "torch's history", "the same, of allocations"
POOL = "--memopts-allocator"


def cpu_clock(run: Callable[[], object], calls: int) -> float:
    """Processor time of this process: what other processes take of the machine does not count."""
    start = time.process_time_ns()
    for _ in range(calls):
        run()
    return (time.process_time_ns() - start) * 1e-9


class Switch:
    """The observer of memory while a contender is timed: none, or one of these."""

    def __init__(self, device: str, first: Callable[[], object]) -> None:
        """first: what is run once with it on before anything is timed: modules are named, tables grow."""
        self.device, self.first, self.enabled = device, first, False
        self.recorded = contextlib.ExitStack()

    def to(self, state: str) -> Callable[[], None]:
        def before() -> None:
            self.recorded.close()
            if self.enabled:  # disable() would take memopt's answers off torch's names, too
                memopt.disable()
            self.enabled = state == ENABLED
            if self.device == "cuda":
                torch.cuda.memory._record_memory_history(None)
            if state == ENABLED:
                memopt.enable()
            elif state == RECORDED:
                self.recorded.enter_context(memopt.profile(self.device, max_events=ENTRIES))
            elif state == TORCHS:
                torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=ENTRIES)
            elif state == LEAN:
                skip = {"skip_actions": ["free_completed", "snapshot"]}
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=ENTRIES, **skip
                )
            self.first()

        return before


def cpu_step(report: harness.Report) -> None:
    task = tasks.get("gpt", "small")
    model = task.build_model("cpu")
    optimizer = task.optimizer(model)
    batch = next(iter(task.batches(1, device="cpu")))

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    switch = Switch("cpu", step)
    found = report.compare(
        "a CPU step of the demo task",
        {name: harness.Contender(step, switch.to(name)) for name in ("plain", ENABLED, RECORDED)},
        peer="plain",
        goal={ENABLED: 1 / 1.01, RECORDED: 1 / 1.05},
        warmup=2,
    )
    switch.to("plain")()
    for name in (ENABLED, RECORDED):
        added = statistics.median(1 / ratio for ratio in found.ratios(name)) - 1
        print(f"{name} adds {100 * added:.2f} % to a CPU step", file=sys.stderr)


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(REQUESTS):
            torch.empty(1000 + n, device="cuda")
        return x


def deep(run: Callable[[], object], frames: int) -> object:
    return deep(run, frames - 1) if frames else run()


def allocations(report: harness.Report) -> None:
    model, x = nn.Sequential(*(Asks() for _ in range(MODULES))), torch.ones(1, device="cuda")
    names = ("no history", TORCHS, LEAN, RECORDED)

    def step() -> object:
        return deep(lambda: model(x), 12)

    switch = Switch("cuda", step)
    found = report.compare(
        f"{MODULES * REQUESTS} allocations and frees of {MODULES} modules",
        {name: harness.Contender(step, switch.to(name)) for name in names},
        peer="no history",
        warmup=2,
        clock=cpu_clock,
    )
    switch.to("no history")()
    best = {name: found.seconds(name).best for name in names}
    added = {name: best[name] - best["no history"] for name in names[1:]}
    each = {name: seconds / (MODULES * REQUESTS) * 1e9 for name, seconds in added.items()}
    report.record("added to an allocation and its free", each, unit="ns", peer=TORCHS)
    share = {name: 100 * seconds * 1e3 / STEP_MS for name, seconds in added.items()}
    report.record(
        f"share of a step of {STEP_MS} ms with {MODULES * REQUESTS} allocations",
        {"limit": 5.0, **share},
        unit="%",
        peer="limit",
    )
    report.record(
        "goal: a recording", {"limit": 5.0, RECORDED: share[RECORDED]}, unit="%", peer="limit", goal=1.0
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(POOL, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memopts_allocator:
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
        report = harness.Report(
            "bench_profile.pool", options, claim="looking at memory costs little under memopt's allocator"
        )
        allocations(report)
        return report.finish()
    report = harness.Report("bench_profile", options, claim="looking at memory costs little")
    allocations(report)
    cpu_step(report)
    given = [sys.executable, __file__, POOL, *(o for o in sys.argv[1:] if o != "--json")]
    return max(report.finish(), 0 if options.output else subprocess.call(given))


if __name__ == "__main__":
    sys.exit(main())
