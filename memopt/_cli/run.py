"""Run an unmodified script under memopt: record its memory, explain an out-of-memory error, and print a summary of the
memory's use at the end. The script's exit code is kept. The recording is written to memopt-<script>.<pid>.mopt, for
`memopt report` and `memopt diff`. Under torchrun, as `torchrun --nproc-per-node 4 -m memopt run script.py`, each rank
writes its recording to the folder memopt-<script>.<job>, or the one that -o names (on several nodes, one that all of
them see), and the rank that ends last reports on all of them, with a page. With --sim the script runs on a simulated
card of that size, which needs PyTorch's CUDA build and no GPU: PyTorch's own CUDA allocator decides what fits, and the
host computes each operation, in as much host memory as the script takes on the card. A backward pass takes some more of
the card than on a real one: computed so, gradients are copied. With --fit the script runs with the changes of a plan
that `memopt fit` made for it, and with no other script, arguments, torch or memopt, no smaller card, no model of
another size, and in as many ranks. With --live one line on the terminal shows live tensors, their peak, what the
allocator reserves, and what the device has in use, or the host where there is no device. The line stays below the
script's output and goes with it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from memopt._cli import count_argument, size_argument
from memopt._estimate import cards, interpreters
from memopt._run import parent
from memopt._run import plan as plans
from memopt._run.plan import Plan
from memopt._run.ranks_folder import Place
from memopt._run.run_child import RunRequest
from memopt.sim import _activation

NAME = "run"
HELP = "run a script and record its memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backend",
        choices=("native", "pool"),
        help="allocator: torch's, or memopt's (MEMOPT_BACKEND, native)",
    )
    add(
        "--budget",
        type=size_argument,
        metavar="SIZE",
        help="most memory that the allocator holds, such as '20GiB' (MEMOPT_BUDGET)",
    )
    add(
        "--on-oom",
        choices=("report", "raise"),
        help="explain an out-of-memory error, or not (MEMOPT_ON_OOM, report)",
    )
    add(
        "--sim",
        metavar="CARD",
        help="run it on a simulated card of that size (8GiB) or name (rtx4090), with real values",
    )
    add("--fit", metavar="PLAN", help="apply the plan of this file, which `memopt fit` has written")
    add("--python", metavar="PATH", help="with --sim: the Python that has PyTorch's CUDA build (this one)")
    add("--device", choices=("cuda", "cpu"), help="device to record (CUDA if there is one, else the CPU)")
    add(
        "--live",
        action="store_true",
        help="show the memory on the terminal while the script runs, in one line",
    )
    add("--no-record", action="store_true", help="do not record")
    add(
        "--max-events",
        type=count_argument(1),
        default=200_000,
        metavar="N",
        help="number of allocations and frees to keep, the most recent ones (200000)",
    )
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module and its arguments")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")


def is_one_of_several() -> bool:
    """Return whether -o names a folder that the ranks of a job share."""
    return Place.of(os.environ) is not None


def run(options: argparse.Namespace) -> int:
    argv = options.script if options.module is None else options.module
    if not argv or (options.module is not None and options.script):
        raise OSError("name a script to run, or -m and a module, followed by its arguments")
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
            "--python needs --sim: without it, start memopt with the Python that is to run the script"
        )
    plan = None
    if options.fit is not None:
        plan = _plan(options, argv, simulated)
    output = options.output
    request = RunRequest(
        argv=argv,
        module=options.module is not None,
        folder="",
        output=str(Path(output).resolve()) if output else None,
        record=not options.no_record,
        device=options.device,
        max_events=options.max_events,
        backend="pool" if plan and plan.backend == "pool" else options.backend,
        memory_budget=options.budget,
        on_oom=options.on_oom,
        simulated=simulated,
        plan=plan,
        live=options.live,
    )
    return parent.run(request, options.quiet, python, noise=bool(options.verbose))


def _plan(options: argparse.Namespace, argv: list[str], simulated: str | None) -> Plan:
    if options.backend is not None or options.budget is not None:
        raise OSError("--fit: the plan decides on the allocator: leave --backend and --budget out")
    try:
        found = plans.read(options.fit)
        found.check_call(argv, module=options.module is not None)
        place = Place.of(os.environ)
        found.check_ranks(1 if place is None else place.count)
        if simulated is not None:
            found.check_card(cards.card(options.sim).usable_bytes)
        found.check_disk()
    except ValueError as error:
        raise OSError(f"--fit: {error}") from None
    return found


def _card(text: str) -> str:
    """Return the settings of the simulated device; in a job, the node has as many devices as ranks."""
    found, place = cards.card(text), Place.of(os.environ)
    return _activation.settings_of(
        memory=found.usable_bytes,
        devices=1 if place is None else place.local_count,
        compute_capability=found.compute_capability,
        multiprocessors=found.multiprocessors,
        context=found.context_bytes,
    )
