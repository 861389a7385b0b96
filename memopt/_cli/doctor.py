"""Report what of memopt works on this machine, and why the rest does not: Python, torch, the CUDA driver and its
devices, the kernels, the simulated device, environment variables. Exits with 1 if something is broken; something that
is merely absent (a GPU, torch) is not broken."""

from __future__ import annotations

import argparse
import json

from memopt._cli import write
from memopt._runtime import doctor

NAME = "doctor"
HELP = "report what works on this machine, and why the rest does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    found = doctor.doctor()
    if options.json:
        text = json.dumps(found.as_dict(), indent=2)
    elif options.quiet:
        text = (
            str(doctor.Diagnosis([f for f in found.findings if f.state == "broken"]))
            if not found.healthy
            else ""
        )
    else:
        text = str(found)
    if text:
        write(text, options.output)
    return 0 if found.healthy else 1
