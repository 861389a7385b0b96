"""Will it fit? Runs a training script, unmodified, on a simulated CUDA card, which needs PyTorch's CUDA build and no
GPU: PyTorch's own allocator decides, kernels compute nothing, and values that the script reads are answered from copies
on the host or guessed, each guess counted. Tells the peak, whether it fits the card, the line where it runs out of
memory, what the memory is for, and what would make it fit. The script runs to its end with shortened loops: a few steps
of training, a few epochs, the first batches and the last one of an evaluation. The kernel keeps what it and its
children write from your files; devices and the network are as they are. SCRIPT is a file or, with -m, a module. Exits
with 0 if it fits, 1 if it does not or that is not sure, 2 if the call was wrong, the script fails by itself, or there
is nothing to tell: it takes no step, or no memory of the card."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from memopt import _C
from memopt.commands import arguments, check_writable, write
from memopt.estimation import batch_option, cards, interpreters, protection
from memopt.estimation.child_process import ChildFailed, Children
from memopt.estimation.prediction import Estimate
from memopt.estimation.progress import Progress
from memopt.estimation.request import BACKENDS, Request
from memopt.estimation.script_output import Followed
from memopt.estimation.survey import ScriptFailed, Survey
from memopt.running import library_noise

NAME = "estimate"
HELP = "whether a script will fit a card, without the card"


def _steps(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return arguments.count(0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of steps: write 1 or more, 0 for a script that does not train, or 'all'"
        ) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


_STEPS = "end a training loop after N optimizer steps; 0: the script does not train; all: end none (3)"
_SPREAD = "with --nproc: a script for one device, its model spread by torch's {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "memopt estimate [options] SCRIPT [its arguments]"
    add("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its own arguments")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    add("--gpu", metavar="CARD", help=f"a size, as 24GiB, or one of {', '.join(c.name for c in cards.CARDS)}")
    add("--compute-capability", metavar="X.Y", help="instead of the card's own (8.0 for a size)")
    add("--context", type=arguments.size, metavar="SIZE", help="taken by the CUDA context (450MiB)")
    add("--steps", type=_steps, default=3, metavar="N", help=_STEPS)
    add("--seconds", type=_seconds, default=600, metavar="S", help="stop a run after S seconds (600)")
    add(
        "--backend",
        choices=BACKENDS,
        default="native",
        help="the allocator: torch's, with expandable segments, or memopt's pool (native)",
    )
    add("--max-batch", action="store_true", help="search the largest batch that fits the card")
    add(
        "--batch-option",
        metavar="NAME",
        help="the script's option for it, as batch-size (found by itself "
        "where it is called so; else every DataLoader's batch_size is changed)",
    )
    add("--smallest-card", action="store_true", help="search the smallest card that suffices")
    add(
        "--quick",
        action="store_true",
        help="one run: no ranges, no other allocators, no search for what fits",
    )
    add(
        "--nproc",
        type=arguments.count(2),
        metavar="N",
        help="as one of N ranks, whose others are pretended: of a script that is made for torchrun, each one's peak",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--ddp", dest="spread", action="store_const", const="ddp", help=_SPREAD.format("DDP"))
    ways.add_argument(
        "--fsdp", dest="spread", action="store_const", const="fsdp", help=_SPREAD.format("fully_shard")
    )
    ways.add_argument(
        "--tp", dest="spread", action="store_const", const="tp", help=_SPREAD.format("parallelize_module")
    )
    add("--python", metavar="PATH", help="the Python that has PyTorch's CUDA build (this one)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--unprotected",
        action="store_true",
        help="where the kernel protects no files: redirect what Python writes, other programs and C code not",
    )
    files.add_argument("--keep-files", action="store_true", help="let the script write where it wants to")
    add("--record", metavar="FILE", help="keep the recording of the run, for `memopt report`")
    add("--jobs", type=int, default=0, metavar="N", help="runs at a time (half of the processors, 4 at most)")
    add("--json", action="store_true", help="the answer as JSON")


def run(options: argparse.Namespace) -> int:
    if options.record:
        check_writable(options.record, options.force)
    try:
        found, status, complaint = _answer(options)
    except (ValueError, interpreters.NoInterpreter, ChildFailed) as error:
        print(f"memopt estimate: {error}", file=sys.stderr)
        if isinstance(error, ChildFailed):
            _tell_of_options_behind(options.script)
        return 2
    except ScriptFailed as failure:
        print(f"memopt estimate: {options.script[0]}: {failure}", file=sys.stderr)
        seen = failure.answer
        print(
            f"  until then: {_C.format_size(seen.peak_allocated)} allocated, "
            f"{_C.format_size(seen.peak_reserved)} reserved, {seen.steps} steps",
            file=sys.stderr,
        )
        _tell_of_options_behind(options.script)
        return 2
    write(json.dumps(found.as_dict(), indent=2) if options.json else str(found), options.output)
    if complaint:
        print(f"memopt estimate: --max-batch: {complaint}", file=sys.stderr)
        return 2
    return status


def _protection(
    options: argparse.Namespace, python: str, argv: list[str], module: bool
) -> protection.Protection:
    if options.keep_files:
        return protection.Protection("none")
    folders = [os.getcwd(), *([] if module else [os.path.dirname(os.path.abspath(argv[0]))])]
    try:
        return protection.find(python, folders)
    except protection.Unprotected as unprotected:
        if not options.unprotected:
            raise
        print(f"memopt estimate: --unprotected: {unprotected}", file=sys.stderr)
        return protection.Protection("redirect")


def _tell_of_options_behind(said: list[str]) -> None:
    """Where a script has failed that was given options which are this command's."""
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    words = [word.partition("=")[0] for word in said[1:]]
    behind = [word for word in words if word.startswith("--") and word in own._option_string_actions]
    if behind:
        print(
            f"memopt estimate: {', '.join(behind)} went to the script: options of memopt come before SCRIPT",
            file=sys.stderr,
        )


def _answer(options: argparse.Namespace) -> tuple[Estimate, int, str]:
    """With the exit status, and what of it could not be answered."""
    argv, module = _script(options.script, options.module)
    context = cards.CONTEXT if options.context is None else options.context
    card = None
    if options.gpu is not None:
        card = cards.card(options.gpu, options.compute_capability, options.context)
    if options.max_batch and card is None:
        raise ValueError("--max-batch searches for a card: name it with --gpu")
    if options.spread and not options.nproc:
        raise ValueError(f"--{options.spread} spreads a model over ranks: say how many with --nproc")
    batch = batch_option.find(argv, options.batch_option)
    plain = cards.card(cards.NO_LIMIT, options.compute_capability, context)
    like = card or plain
    request = Request(
        argv=argv,
        answer="",  # each run has its own
        module=module,
        memory=cards.NO_LIMIT,
        context=context,
        compute_capability=like.compute_capability,
        multiprocessors=like.multiprocessors,
        steps=options.steps,
        seconds=options.seconds,
        backend=options.backend,
        ranks=options.nproc or 0,
        spread=options.spread,
    )
    try:
        python = interpreters.find(options.python)
    except interpreters.NoInterpreter as error:
        if options.python is not None or options.max_batch or options.smallest_card or options.nproc:
            raise
        protected = _protection(options, sys.executable, argv, module)
        return _on_fake_tensors(options, argv, module, card, str(error), protected)
    protected = _protection(options, python, argv, module)
    request = replace(request, protection=protected.way, share_memory=protected.share_memory)
    with (
        Progress(not options.quiet, lines=not options.verbose) as progress,
        Children(python, progress.script, noise=bool(options.verbose)) as children,
    ):
        survey = Survey(
            title=" ".join(("-m", *argv) if module else argv),
            request=request,
            run=children.run,
            shown=lambda asked: children.run(asked, show=not options.quiet, recording=options.record),
            card=card,
            batch=batch,
            jobs=options.jobs or max(1, min(4, (os.cpu_count() or 2) // 2)),
            say=progress.say,
        )
        ranks = survey.highest_rank() if options.nproc else None
        full = not options.quick
        found = survey.estimate(ranges=full, compare=full, mend=full and not options.max_batch)
        found.recording, found.ranks = options.record, ranks
        complaint = ""
        if options.max_batch and card is not None:
            try:
                survey.largest_batch(found, card)
            except ValueError as error:
                complaint = str(error)
        if options.smallest_card:
            survey.smallest_card(found)
    return found, 0 if found.verdict in ("", "fits") else 1, complaint


def _on_fake_tensors(
    options: argparse.Namespace,
    argv: list[str],
    module: bool,
    card: cards.Card | None,
    reason: str,
    protected: protection.Protection,
) -> tuple[Estimate, int, str]:
    """In a fork of this process: what torch is here has no CUDA code that could run."""
    from memopt.torch_version import require

    if not options.verbose:
        library_noise.silence()
    require("memopt estimate")
    from memopt.estimation import fake_estimate, fake_run
    from memopt.estimation.fake_script import FakeScript

    with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder, contextlib.ExitStack() as shown:
        script = FakeScript(
            argv=argv,
            module=module,
            count=options.steps,
            protection=protected,
            folder=os.path.realpath(folder),
        )
        output = shown.enter_context(open(Path(folder) / "output", "wb"))
        progress = shown.enter_context(Progress(not options.quiet, lines=not options.verbose))
        progress.say(f"{' '.join(argv)} on fake tensors")
        if not options.quiet:
            shown.enter_context(Followed(output.name, progress.script))
        answer = fake_run.run(script, options.seconds, output.fileno())
    found = fake_estimate.made_of(answer, " ".join(argv), card, reason)
    if options.steps is not None and answer.steps >= options.steps:
        found.covered = [f"{answer.steps} steps, then it was ended: what comes after was not seen"]
    return found, 0 if found.verdict in ("", "fits") else 1, ""


def _script(said: list[str], module: bool) -> tuple[list[str], bool]:
    if said[:1] == ["--"]:
        said = said[1:]
    if not said:
        raise ValueError("which script? memopt estimate [options] SCRIPT [its arguments]")
    script = said[0]
    if module:
        if not re.fullmatch(r"\w+(\.\w+)*", script):
            raise ValueError(f"{script!r} is no module's name")
        return said, True
    if script.startswith("-"):
        raise ValueError(f"{script} is no option of memopt estimate, whose options come before SCRIPT")
    if not Path(script).exists():
        raise ValueError(f"there is no script {script!r}")
    if Path(script).is_dir():
        raise ValueError(f"{script!r} is a folder, not a script")
    return said, False
