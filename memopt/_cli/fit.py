"""Make it fit: find the changes with which an unmodified training script fits a card, on a machine without that card.
Each plan is a run on a simulated card, as in `memopt estimate`. The plan has the lowest tier of exactness that is
enough (free: nothing changes, another allocator; bit-equal: activations recomputed or on the host; equal to rounding:
another optimizer's step, the loss head in chunks, gradients, states or layers on the host, states on a disk where
--disk names a directory; other numbers: only what --allow names), is the fastest found in that tier by a simple model
of cost, and leaves out what is not needed and saves no time. The answer has the lines to write. The plan's file (-o, by
default SCRIPT's name with .fit.json) applies it to the script as it is: `memopt run --fit train.fit.json train.py`.
With --nproc it is for each rank of a job of torchrun's, by the peak of the one with the highest. Exits with 0 if the
script fits, as it is or with the plan, 1 if nothing fits, 2 if the call was wrong, the script fails by itself, or there
is nothing to report because it takes no step or no memory of the card."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from pathlib import Path

from memopt._cli import check_writable, count_argument, size_argument
from memopt._cli.estimate import add_script_arguments, request_of, script_of, surveyed, told
from memopt._estimate import cards, fit, interpreters
from memopt._estimate.request import find_batch_option
from memopt._runtime import arguments
from memopt._runtime.table import line_width, with_command

NAME = "fit"
HELP = "find changes with which a script fits a card, and plan them"


def _allowed(text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in fit.ALLOWED:
            raise argparse.ArgumentTypeError(
                f"{word!r} is nothing that can be allowed: write one or more of {', '.join(fit.ALLOWED)}, with commas"
            )
    return [fit.ALLOWED[word] for word in words]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_script_arguments(parser, NAME)
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--exact", action="store_true", help="results keep all their bits")
    numbers.add_argument(
        "--allow",
        type=_allowed,
        default=[],
        metavar="WORDS",
        help="what may change numbers: 8bit, 4bit (optimizer states of so many bits), factored (second moments as "
        "averages of rows and columns), bf16 (autocast of the model), 8bit-activations (what is saved for the backward "
        "pass)",
    )
    parser.add_argument(
        "--batch",
        type=count_argument(1),
        metavar="N",
        help="plan for a batch of N: the script's option for it gets this number",
    )
    parser.add_argument(
        "--host-memory",
        type=size_argument,
        metavar="SIZE",
        help="memory of the card's host, for what a plan puts there (no limit)",
    )
    parser.add_argument(
        "--disk",
        metavar="DIR",
        help="a directory on a disk, for optimizer states that the host's memory has no room for (none)",
    )


def run(options: argparse.Namespace) -> int:
    return told(options, functools.partial(_tell, options))


def _with_batch(argv: list[str], name: str | None, size: int) -> list[str]:
    option = find_batch_option(argv, name)
    if not option.name:
        raise ValueError(f"--batch {size}: name the script's option for its batch size, with --batch-option")
    return option.with_size(argv, size)


def _tell(options: argparse.Namespace) -> int:
    argv = script_of(options)
    disk = None if options.disk is None else arguments.directory(options.disk, "--disk")
    if options.batch is not None:
        argv = _with_batch(argv, options.batch_option, options.batch)
    if options.gpu is None:
        raise ValueError("name the card that the script is to fit, or its size, with --gpu")
    if options.steps == 0:
        raise ValueError("--steps 0: a script that takes no step has nothing to plan; see `memopt estimate`")
    card = cards.card(options.gpu, options.compute_capability, options.context)
    name = argv[0].rpartition(".")[2] if options.module else Path(argv[0]).stem
    output = options.output or f"{name}.fit.json"
    check_writable(output, options.force)
    python = interpreters.find(options.python)
    with surveyed(options, request_of(options, argv, card), python, card) as survey:
        ranks = survey.highest_rank() if options.nproc else None
        found = fit.find(survey, card, options.allow, options.exact, options.host_memory, disk)
        found.estimate.ranks = ranks
    sys.stdout.write((json.dumps(found.as_dict(), indent=2) if options.json else str(found)) + "\n")
    if found.plan is None:
        return 1
    found.plan.write(output)
    if not options.json:
        start = ["torchrun", "--nproc-per-node", str(options.nproc)] if options.nproc else ["python"]
        module = ["-m"] if options.module else []
        command = shlex.join([*start, "-m", "memopt", "run", "--fit", output, *module, *argv])
        print("\n".join(with_command(f"planned in {output}", command, line_width())))
    return 0
