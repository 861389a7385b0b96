"""The allocators on a real GPU. (The time of each call of the driver: `python -m memopt gpu-check --parts driver`.)

    python      the host's CPU time for torch.empty and del: PyTorch's own allocator, its expandable segments, memopt
    training    the loops of workloads.py: memory held over the live peak, and the time of a step

Without a GPU it says so and measures nothing: exit status 2. --simulated runs all of it on memopt's simulated device,
to test this script: its times are those of functions that do next to nothing, its result says that it is simulated,
and it is never written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import memopt  # noqa: E402
from benchmarks import harness  # noqa: E402
from benchmarks.bench_alloc_train import Child, report_host_time, say  # noqa: E402

ALLOCATORS = ("native", "expandable", "memopt")
STATUS_NO_GPU = 2


# ---- training --------------------------------------------------------------------------------------


def report_training(report: harness.Report, names: list[str], options: argparse.Namespace) -> None:
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    for allocator in options.allocators:
        for name in names:
            child = Child(allocator, real=not options.simulated)
            measured[name][allocator] = found = child.ask(
                train=name, scale=options.scale, steps=options.steps
            )
            child.close()
            say(f"{name:24}{allocator:14}held {found['held'] / found['live_peak']:.4f}")
    report.note("training", measured)
    for name, by_allocator in measured.items():
        report.record(
            f"held, {name}",
            {allocator: found["held"] / found["live_peak"] for allocator, found in by_allocator.items()},
            unit="of the live peak",
            peer=options.allocators[0],
        )
        # The first half of the steps warms up: libraries load, kernels are compiled, memory is mapped.
        report.record(
            f"a step, {name}",
            {
                allocator: statistics.median(found["seconds"][len(found["seconds"]) // 2 :]) * 1e3
                for allocator, found in by_allocator.items()
            },
            unit="ms, median of the later half",
            peer=options.allocators[0],
        )


def refuse_results(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A simulated device's times are nobody's result."""
    if options.output and options.output.resolve().is_relative_to(harness.RESULTS):
        parser.error(f"--simulated measures no GPU: its result is not for {harness.RESULTS.name}/")
    if not options.output and not options.quick:
        parser.error("--simulated measures no GPU, and keeps no result: give -o FILE, or --quick")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--simulated", action="store_true", help="on memopt's simulated device: tests this script"
    )
    parser.add_argument("--only", choices=["python", "training"], help="one half of it")
    parser.add_argument(
        "--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS), help="all three"
    )
    parser.add_argument("--workloads", nargs="+", help="by name; all nine")
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads (1)")
    parser.add_argument("--steps", type=int, help="as many as each workload says")
    options = parser.parse_args()
    if options.simulated:
        refuse_results(parser, options)
        from memopt import sim

        sim.activate(memory="64GiB", blank=True)
    if options.quick:
        options.scale, options.steps = min(options.scale, 0.25), options.steps or 6
    driver = next(found for found in memopt.doctor().findings if found.topic == "cuda driver")
    if driver.state != "ok":
        print(
            f"bench_alloc_gpu: {driver.text}. It measures a real GPU and nothing else; bench_alloc_train.py and"
            " bench_alloc_core.py are what can be measured without one.",
            file=sys.stderr,
        )
        return STATUS_NO_GPU

    options.cuda = True  # the device and its driver are part of what is reported
    report = harness.Report("bench_alloc_gpu", options)
    report.note("simulated", options.simulated)
    report.note("driver", driver.text)
    if options.only in (None, "python"):
        report_host_time(report, options.allocators, real=not options.simulated)
    if options.only in (None, "training"):
        from benchmarks.workloads import WORKLOADS

        unknown = sorted(set(options.workloads or ()) - set(WORKLOADS))
        if unknown:
            parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
        report_training(report, options.workloads or list(WORKLOADS), options)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
