"""A script run as `python script.py` runs it, in this process, and how it ended."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from memopt.estimation.watch import Stopped
from memopt.oom.recognition import followed
from memopt.running.as_main import run_as_main

_HERE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class End:
    """stopped: "end", "exit", "error", or why it was Stopped. out_of_memory: the exception that ended it, or led to
    the one that did."""

    stopped: str
    status: int
    error: BaseException | None = None
    out_of_memory: torch.OutOfMemoryError | None = None


def run(argv: list[str], module: bool) -> End:
    """Runs it to its end; what it raises is part of the answer."""
    try:
        run_as_main(argv, module)
    except Stopped as stopped:
        return End(stopped.why, 0)
    except SystemExit as exit_:
        return End("exit", _status(exit_))
    except BaseException as error:
        behind = (one for one in followed(error, everything=True) if isinstance(one, torch.OutOfMemoryError))
        return End("error", 1, error, next(behind, None))
    return End("end", 0)


def _status(exit_: SystemExit) -> int:
    """As the interpreter would end with it."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """The traceback, from the script's first line on."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen")):
        tb = tb.tb_next
    traceback.print_exception(type(error), error, tb)
