"""Runs a script, unmodified, under memopt: what lived in memory when is recorded, an out of memory is explained, and at
the end one screen says where the memory went. The script's exit code is kept. The recording is written to
memopt-<script>.<pid>.mopt, for `memopt report` and `memopt diff`. Under torchrun, as `torchrun --nproc-per-node 4 -m
memopt run script.py`, each rank writes its recording to the folder memopt-<script>.<job> (or that which -o names, on
several nodes one that all of them see), and the one that ends last tells of all, with a page. With --sim the script
runs on a simulated card of that size, which needs PyTorch's CUDA build and no GPU: PyTorch's own CUDA allocator decides
what fits, and the host computes each operation, in as much of its own memory as the script takes on the card."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from memopt.commands import arguments
from memopt.estimation import cards, interpreters
from memopt.running import parent
from memopt.running.ranks_folder import Place
from memopt.running.request import Request
from memopt.sim import activation

NAME = "run"
HELP = "run a script, see its memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backend",
        choices=("native", "pool"),
        help="allocator: torch's, or memopt's (MEMOPT_BACKEND, native)",
    )
    add(
        "--budget",
        type=arguments.size,
        metavar="SIZE",
        help="that the allocator holds at most, as '20GiB' (MEMOPT_BUDGET)",
    )
    add(
        "--on-oom",
        choices=("report", "raise"),
        help="explain an out of memory, or not (MEMOPT_ON_OOM, report)",
    )
    add(
        "--sim",
        metavar="CARD",
        help="run it on a simulated card, a size (as 8GiB) or a name (as rtx4090), with real values",
    )
    add("--python", metavar="PATH", help="with --sim: the Python that has PyTorch's CUDA build (this one)")
    add("--device", choices=("cuda", "cpu"), help="to record (CUDA where there is a device, else the CPU)")
    add("--no-record", action="store_true", help="record nothing; the rest stays")
    add(
        "--max-events",
        type=arguments.count(1),
        default=200_000,
        metavar="N",
        help="births and deaths to keep, the last (200000)",
    )
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module and its arguments")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")


def is_one_of_several() -> bool:
    """Whether -o names the folder that the ranks of a job share."""
    return Place.of(os.environ) is not None


def run(options: argparse.Namespace) -> int:
    argv = options.script if options.module is None else options.module
    if not argv or (options.module is not None and options.script):
        raise OSError("name a script to run, or -m and a module, with its arguments behind it")
    if options.module is None and not Path(argv[0]).exists():
        raise OSError(f"{argv[0]}: there is no such script")
    simulated, python = None, sys.executable
    if options.sim is not None:
        try:
            simulated, python = _card(options.sim), interpreters.find(options.python)
        except (ValueError, interpreters.NoInterpreter) as error:
            raise OSError(f"--sim: {error}") from None
    elif options.python is not None:
        raise OSError(
            "--python goes with --sim: without it, start memopt by the Python that is to run the script"
        )
    output = options.output
    request = Request(
        argv=argv,
        module=options.module is not None,
        folder="",
        output=str(Path(output).resolve()) if output else None,
        record=not options.no_record,
        device=options.device,
        max_events=options.max_events,
        backend=options.backend,
        memory_budget=options.budget,
        on_oom=options.on_oom,
        simulated=simulated,
    )
    return parent.run(request, options.quiet, python, noise=bool(options.verbose))


def _card(text: str) -> str:
    """Settings of the device; of each rank of a job, as many as the node has ranks."""
    found, place = cards.card(text), Place.of(os.environ)
    return activation.settings_of(
        memory=found.usable,
        devices=1 if place is None else place.local_count,
        compute_capability=found.compute_capability,
        multiprocessors=found.multiprocessors,
        context=found.context,
    )
