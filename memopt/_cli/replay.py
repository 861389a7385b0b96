"""Replay a trace of requests through memopt's allocator on a model device, and report how much memory they would have
needed: live_peak (the most bytes of requests live at once), peak_reserved (the most that was held), frontier (the
smallest device that completes, with --frontier), and the driver calls. TRACE is a file in the plain form (a line an
event: `a <id> <bytes> <stream> [<device> [<pool>]]`, `f <id> <stream>`, `r <id> <stream>`, `w <stream> <stream>`, `s`
at the end of a step, `#` comments), or a snapshot of torch.cuda.memory._dump_snapshot(), of which nothing is executed.
Exits with 1 if the trace does not complete within the budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from memopt import _C
from memopt._cli import count_argument, size_argument, write
from memopt._memory.recording import snapshot_file

NAME = "replay"
HELP = "replay a recorded run through memopt's allocator"

# The keys of the JSON: of a run; what is by step, with --steps only.
RUN = (
    "completed failed_line failure peak_reserved stitches granules_moved granules_switched driver_calls"
    " driver_calls_last_step host_waits operations ns_per_op"
    " request_ns_p50 request_ns_p99 request_ns_max"
).split()
BY_STEP = (
    "driver_calls_per_step granules_moved_per_step granules_switched_per_step host_waits_per_step held_per_step"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace, or a torch snapshot")
    add(
        "--budget",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="memory of the device, such as '8GiB' (no limit)",
    )
    add(
        "--frontier",
        action="store_true",
        help="search for the smallest device on which the trace completes, too",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    add("--steps", action="store_true", help="include the figures of every step in the JSON")
    add("--device", type=count_argument(0), metavar="N", help="device of the trace (the only one)")
    add(
        "--slack",
        type=count_argument(0),
        default=20,
        metavar="N",
        help="memory held beyond the live peak, in thousandths of it (20)",
    )
    add(
        "--small-limit",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="largest request that counts as small (64KiB)",
    )
    add("--lazy", action="store_true", help="the device is one step behind the host")
    add("--no-double-map", action="store_true", help="move memory only after its last use has completed")
    add("--no-recall", action="store_true", help="do not reuse the placement of a step that repeats")
    add("--check", action="store_true", help="check all invariants and every use of memory (slow)")


def _figures(run: Any, steps: bool) -> dict[str, Any]:
    moved = run["granules_moved_per_step"]
    figures = {key: run[key] for key in RUN}
    figures["steps"] = len(moved)
    figures["granules_moved_per_step_max"] = max(moved, default=0)
    figures["granules_moved_per_step_mean"] = sum(moved) / len(moved) if moved else 0.0
    if steps:
        figures.update({key: run[key] for key in BY_STEP})
    return figures


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    trace = snapshot_file.read(Path(options.trace).read_bytes())

    def run(search: bool) -> Any:
        return _C.replay(
            trace,
            0 if search else options.budget,
            options.slack,
            options.small_limit,
            not options.no_double_map,
            not options.no_recall,
            options.lazy,
            options.check,
            -1 if options.device is None else options.device,
            search,
        )

    plain = run(False)
    answer = {"live_peak": plain["live_peak"], "frontier": None, **_figures(plain, options.steps)}
    if options.frontier:
        best = run(True)
        answer["frontier"] = best["frontier"]
        answer["at_frontier"] = _figures(best, options.steps)
    return answer


def _of_live(size: int, live: int) -> str:
    return f"{_C.format_size(size)} ({size / live:.4f} of it)" if live else _C.format_size(size)


def _text(answer: dict[str, Any]) -> str:
    live = answer["live_peak"]
    rows = [("live peak", _C.format_size(live)), ("held at most", _of_live(answer["peak_reserved"], live))]
    if answer["frontier"] is not None:
        rows.append(("smallest device", _of_live(answer["frontier"], live)))
        at = answer["at_frontier"]
        rows.append(
            (
                "  moved there",
                f"{at['granules_moved']} granules, at most {at['granules_moved_per_step_max']} in a step",
            )
        )
    rows += [
        ("moved", f"{answer['granules_moved']} granules for {answer['stitches']} requests"),
        (
            "driver calls",
            f"{answer['driver_calls']} for memory, {answer['driver_calls_last_step']} of them in the last step",
        ),
        ("host waits", f"{answer['host_waits']} for work on the device, before a request could be served"),
        (
            "steps, requests",
            f"{answer['steps']}, {answer['operations']} calls of {answer['ns_per_op']:.0f} ns;"
            f" 99 % of the requests at most {answer['request_ns_p99']} ns",
        ),
    ]
    if not answer["completed"]:
        rows.append((f"line {answer['failed_line']}", answer["failure"]))
    return "\n".join(f"{name:16} {value}" for name, value in rows)


def run(options: argparse.Namespace) -> int:
    try:
        answer = _answer(options)
    except (ValueError, _C.Error) as error:
        raise OSError(f"{options.trace}: {error}") from error
    write(json.dumps(answer, indent=2) if options.json else _text(answer), options.output)
    return 0 if answer["completed"] else 1
