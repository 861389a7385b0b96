"""The cost of memopt.enable() without recording in a training step: under a hundredth.

A step of the demo task on the CPU, with what enable() watches and without, in turns in one process; then what it adds
to an optimizer's step that does nothing, beside a hundredth of the step. Nothing is added to an allocation: the report
of an out-of-memory error costs time only when there is one. Snapshots of live tensors, taken when memory rises, are
counted where one is taken.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import memopt  # noqa: E402
from benchmarks import harness, tasks  # noqa: E402

LIMIT = 0.01  # of a step


def added_seconds(steps: int) -> float:
    """To a step, the ends of its windows included; the difference of the least of five runs each, taken in turns."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)  # without a gradient: the step does nothing
    best = {memopt.disable: float("inf"), memopt.enable: float("inf")}
    for _ in range(5):
        for switch in best:
            switch()
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            best[switch] = min(best[switch], (time.perf_counter() - start) / steps)
    memopt.disable()
    return best[memopt.enable] - best[memopt.disable]


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_enable", options)
    task = tasks.get("gpt", "small")
    model = task.build_model(report.device)
    optimizer = task.optimizer(model)
    batch = next(task.batches(1, report.device))

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    found = report.compare(
        f"a step of {task.name}",
        {
            "without": harness.Contender(step, memopt.disable),
            "enabled": harness.Contender(step, memopt.enable),
        },
        peer="without",
        goal={"enabled": 1 - LIMIT},
        calls=None if not options.quick else 2,
    )
    memopt.disable()
    seconds = found.seconds("without").best
    report.record(
        "what enable() does after a step, and a hundredth of the step",
        {"limit": LIMIT * seconds * 1e6, "memopt": added_seconds(100 if options.quick else 2000) * 1e6},
        unit="us",
        peer="limit",
        goal=1.0,
    )
    report.note("task", task.metadata())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
