"""Will it fit? Run an unmodified training script on a simulated CUDA card, which needs PyTorch's CUDA build and no GPU.
PyTorch's own allocator decides and kernels compute nothing. Values that the script reads are answered from copies on
the host or guessed, and each guess is counted. The answer has the peak, whether it fits the card, the line where it
runs out of memory, the memory's categories, and changes that would make it fit. The script runs to its end with
shortened loops: a few training steps, a few epochs, the first batches and the last one of an evaluation. Processes that
it starts count: the peaks of those that use a card at the same time are added. The kernel protects your files from
writes of the script and its children; devices and the network are not protected. SCRIPT is a file or, with -m, a
module. Exits with 0 if it fits, 1 if it does not or that is not sure, 2 if the call was wrong, the script fails by
itself, or there is nothing to report because it takes no step or no memory of the card."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from memopt import _C
from memopt._cli import check_writable, count_argument, size_argument, write
from memopt._estimate import cards, interpreters, protection
from memopt._estimate.child_process import ScriptChildren
from memopt._estimate.prediction import Estimate
from memopt._estimate.progress import Followed, Progress
from memopt._estimate.request import Request, find_batch_option
from memopt._estimate.survey import ScriptFailed, Survey
from memopt._run.plan import BACKENDS
from memopt._runtime.process import ChildFailed, silence_libraries

NAME = "estimate"
HELP = "predict whether a script fits a card, without the card"


def _steps(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return count_argument(0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps: write 1 or more, 0 for a script that does not train, or 'all'"
        ) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


_STEPS = "end a training loop after N optimizer steps; 0: the script does not train; all: shorten no loop (3)"
_SPREAD = "with --nproc: parallelize the model of a script for one device with torch's {}"


def add_script_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments that each command has that runs scripts for an estimate."""
    add = parser.add_argument
    parser.usage = f"memopt {command} [options] SCRIPT [its arguments]"
    add("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its own arguments")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    add(
        "--gpu",
        "--card",
        dest="gpu",
        metavar="CARD",
        help=f"a size, such as 24GiB, or one of {', '.join(c.name for c in cards.CARDS)}",
    )
    add("--compute-capability", metavar="X.Y", help="instead of the card's own (8.0 for a size)")
    add("--context", type=size_argument, metavar="SIZE", help="memory of the CUDA context (450MiB)")
    add("--steps", type=_steps, default=3, metavar="N", help=_STEPS)
    add("--seconds", type=_seconds, default=600, metavar="S", help="stop a run after S seconds (600)")
    add(
        "--batch-option",
        metavar="NAME",
        help="the script's option for the batch size (by default one named like batch-size; "
        "without such an option every DataLoader's batch_size is changed)",
    )
    add(
        "--nproc",
        type=count_argument(2),
        metavar="N",
        help="run as one of N ranks, with fake process groups: the peak of each rank of a script for torchrun",
    )
    add("--python", metavar="PATH", help="the Python that has PyTorch's CUDA build (this one)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--unprotected",
        action="store_true",
        help="if the kernel cannot protect files, redirect Python's writes only, not those of other "
        "programs and C code",
    )
    files.add_argument("--keep-files", action="store_true", help="let the script write to your files")
    add("--jobs", type=int, default=0, metavar="N", help="runs at a time (half of the processors, 4 at most)")
    add("--json", action="store_true", help="print the answer as JSON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_script_arguments(parser, NAME)
    add = parser.add_argument
    add(
        "--backend",
        choices=BACKENDS,
        default="native",
        help="the allocator: torch's, with expandable segments, or memopt's pool (native)",
    )
    add("--max-batch", action="store_true", help="search for the largest batch that fits the card")
    add("--smallest-card", action="store_true", help="search for the smallest card that suffices")
    add(
        "--quick",
        action="store_true",
        help="one run: no ranges, no other allocators, no search for what fits",
    )
    add(
        "--devices",
        type=count_argument(1),
        default=1,
        metavar="N",
        help="number of such cards in the machine; the answer is for the fullest one (1)",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--ddp", dest="spread", action="store_const", const="ddp", help=_SPREAD.format("DDP"))
    ways.add_argument(
        "--fsdp", dest="spread", action="store_const", const="fsdp", help=_SPREAD.format("fully_shard")
    )
    ways.add_argument(
        "--tp", dest="spread", action="store_const", const="tp", help=_SPREAD.format("parallelize_module")
    )
    add("--record", metavar="FILE", help="write the recording of the run, for `memopt report`")


def run(options: argparse.Namespace) -> int:
    if options.record:
        check_writable(options.record, options.force)
    return told(options, functools.partial(_tell, options))


def told(options: argparse.Namespace, tell: Callable[[], int]) -> int:
    """Return the exit status of `tell`, or 2 with its error on standard error."""
    try:
        return tell()
    except (ValueError, interpreters.NoInterpreter, ChildFailed) as error:
        print(f"memopt {options.command}: {error}", file=sys.stderr)
        if isinstance(error, ChildFailed):
            _tell_of_options_behind(options)
        return 2
    except ScriptFailed as failure:
        print(f"memopt {options.command}: {options.script[0]}: {failure}", file=sys.stderr)
        seen = failure.answer
        print(
            f"  until then: {_C.format_size(seen.peak_allocated)} allocated, "
            f"{_C.format_size(seen.peak_reserved)} reserved, {seen.steps} steps",
            file=sys.stderr,
        )
        _tell_of_options_behind(options)
        return 2


def _tell(options: argparse.Namespace) -> int:
    found, status, complaint = _answer(options)
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
            raise protection.Unprotected(
                f"{unprotected}: --unprotected {protection.GOES_ON}; --keep-files lets the script write"
            ) from None
        print(f"memopt {options.command}: {unprotected}: --unprotected {protection.GOES_ON}", file=sys.stderr)
        return protection.Protection("redirect")


def _tell_of_options_behind(options: argparse.Namespace) -> None:
    """Print a hint if a failed script was given options that belong to this command."""
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    words = [word.partition("=")[0] for word in options.script[1:]]
    behind = [word for word in words if word.startswith("--") and word in own._option_string_actions]
    if behind:
        said = f"the script was given {', '.join(behind)}: options of memopt come before SCRIPT"
        print(f"memopt {options.command}: {said}", file=sys.stderr)


def _answer(options: argparse.Namespace) -> tuple[Estimate, int, str]:
    """Return the estimate, the exit status, and a complaint about what could not be answered."""
    argv, module = script_of(options), options.module
    card = None
    if options.gpu is not None:
        card = cards.card(options.gpu, options.compute_capability, options.context)
    if options.max_batch and card is None:
        raise ValueError("--max-batch needs a card: name it with --gpu")
    if options.spread and not options.nproc:
        raise ValueError(
            f"--{options.spread} parallelizes a model over ranks: give their number with --nproc"
        )
    if options.nproc and options.devices > 1:
        raise ValueError("--nproc estimates one rank, which has one card: leave --devices out")
    request = replace(
        request_of(options, argv, card),
        backend=options.backend,
        devices=options.devices,
        spread=options.spread,
    )
    try:
        python = interpreters.find(options.python)
    except interpreters.NoInterpreter as error:
        if options.python is not None or options.max_batch or options.smallest_card or options.nproc:
            raise
        protected = _protection(options, sys.executable, argv, module)
        return _on_fake_tensors(options, argv, module, card, str(error), protected)
    with surveyed(options, request, python, card) as survey:
        ranks = survey.highest_rank() if options.nproc else None
        full = not options.quick
        found = survey.estimate(ranges=full, compare=full, fixes=full and not options.max_batch)
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


def request_of(options: argparse.Namespace, argv: list[str], card: cards.Card | None) -> Request:
    """Return the request for a script's run without a limit of memory."""
    return Request(
        argv=argv,
        answer="",  # each run has its own
        memory=cards.NO_LIMIT,
        steps=options.steps,
        seconds=options.seconds,
        module=options.module,
        ranks=options.nproc or 0,
    ).like(card or cards.card(cards.NO_LIMIT, options.compute_capability, options.context))


@contextlib.contextmanager
def surveyed(
    options: argparse.Namespace, request: Request, python: str, card: cards.Card | None
) -> Iterator[Survey]:
    """The survey of a request, and its progress."""
    batch = find_batch_option(request.argv, options.batch_option)
    recording = getattr(options, "record", None)
    with (
        Progress(not options.quiet, options.command, lines=not options.verbose) as progress,
        ScriptChildren(python, progress.script, noise=bool(options.verbose)) as children,
    ):
        yield Survey(
            title=" ".join(("-m", *request.argv) if request.module else request.argv),
            request=request.protected(_protection(options, python, request.argv, request.module)),
            run=children.run,
            shown=lambda asked: children.run(asked, show=not options.quiet, recording=recording),
            card=card,
            batch=batch,
            jobs=options.jobs or max(1, min(4, (os.cpu_count() or 2) // 2)),
            say=progress.say,
        )


def _on_fake_tensors(
    options: argparse.Namespace,
    argv: list[str],
    module: bool,
    card: cards.Card | None,
    reason: str,
    protected: protection.Protection,
) -> tuple[Estimate, int, str]:
    """Estimate in a fork of this process, whose torch has no CUDA code that could run."""
    from memopt._runtime.torch_version import require

    if not options.verbose:
        silence_libraries()
    require("memopt estimate")
    from memopt._estimate import fake_tensors

    with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder, contextlib.ExitStack() as shown:
        script = fake_tensors.FakeScript(argv=argv, module=module, count=options.steps)
        output = shown.enter_context(open(Path(folder) / "output", "wb"))
        progress = shown.enter_context(Progress(not options.quiet, lines=not options.verbose))
        progress.say(f"{' '.join(argv)} on fake tensors")
        if not options.quiet:
            shown.enter_context(Followed(output.name, progress.script))
        try:
            answer = fake_tensors.run(script, options.seconds, protected, output.fileno())
        except fake_tensors.NoFakeTensors as error:
            raise ChildFailed(f"{error}; a simulated card may run it, but {reason}") from error
    found = fake_tensors.estimate_of(answer, " ".join(argv), card, reason)
    if options.steps is not None and answer.steps >= options.steps:
        found.covered = [f"{answer.steps} steps, then it was ended: what follows was not seen"]
    return found, 0 if found.verdict in ("", "fits") else 1, ""


def script_of(options: argparse.Namespace) -> list[str]:
    """Return the script, or the module's name, and its arguments. Raises ValueError if there is none."""
    said: list[str] = options.script
    command = options.command
    if said[:1] == ["--"]:
        said = said[1:]
    if not said:
        raise ValueError(f"SCRIPT is missing: memopt {command} [options] SCRIPT [its arguments]")
    script = said[0]
    if options.module:
        if not re.fullmatch(r"\w+(\.\w+)*", script):
            raise ValueError(f"{script!r} is not a module's name")
        return said
    if script.startswith("-"):
        raise ValueError(f"{script} is not an option of memopt {command}; its options come before SCRIPT")
    if not Path(script).exists():
        raise ValueError(f"there is no script {script!r}")
    if Path(script).is_dir():
        raise ValueError(f"{script!r} is a folder, not a script")
    return said
