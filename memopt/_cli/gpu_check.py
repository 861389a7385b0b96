"""Check memopt on this machine's GPU, in nine parts: environment, kernels, memory at two addresses, streams, the
driver's times, the allocator, bandwidth, an estimate beside a step's memory, and the features beside plain torch. Each
part runs in a process of its own. Prints a Markdown summary; -o writes the report as JSON. Exits with 1 if a part is
wrong or there is no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memopt._cli import write
from memopt._gpu_check import check_report
from memopt._gpu_check.processes import PARTS, check

NAME = "gpu-check"
HELP = "check memopt on this machine's GPU, and write a report to share"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="small sizes: a minute or two (the default)")
    length.add_argument("--full", action="store_true", help="larger sizes and more rounds")
    parser.add_argument(
        "--simulated", action="store_true", help="on the simulated device: tests the checks themselves"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="PART",
        choices=PARTS,
        default=list(PARTS),
        help=f"some of: {', '.join(PARTS)} (all; environment is always one)",
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="print two reports side by side, run nothing"
    )


def run(options: argparse.Namespace) -> int:
    if options.compare:
        try:
            first, second = map(check_report.read, options.compare)
        except ValueError as error:
            print(f"memopt gpu-check: {error}", file=sys.stderr)
            return 2
        write(check_report.compared(first, second), options.output)
        return 0
    names = [name for name in PARTS if name in options.parts or name == "environment"]

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr)

    found = check(names, not options.full, options.simulated, say)
    if options.output:  # beside the summary, not instead of it
        Path(options.output).write_text(json.dumps(found.as_dict(), indent=2) + "\n")
    print(found)
    return 0 if found.passed and found.parts[0].status != "not here" else 1
