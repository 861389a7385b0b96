"""A script run in this process as `python script.py` runs it, and how it ended."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from memopt._estimate.watch import Stopped
from memopt._memory.oom.exceptions import followed
from memopt._memory.recording.user_code import is_user_file
from memopt._run.runpy_main import run_as_main

_HERE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class End:
    """The end of a script.

    stopped: "end", "exit", "error", or the reason of Stopped. out_of_memory: the exception that ended it, or led to the
    one that did. where: the script's line at which it was stopped.
    """

    stopped: str
    status: int
    error: BaseException | None = None
    out_of_memory: torch.OutOfMemoryError | None = None
    where: str = ""


def run(argv: list[str], module: bool) -> End:
    """Run the script to its end; an exception is part of the result."""
    try:
        run_as_main(argv, module)
    except SystemExit as exit_:
        return End("exit", _status(exit_))
    except BaseException as error:
        return ended_by(error)
    return End("end", 0)


def ended_by(error: BaseException) -> End:
    if isinstance(error, Stopped):
        return End(error.why, 0, where=_where(traceback.extract_tb(error.__traceback__)))
    behind = (one for one in followed(error, everything=True) if isinstance(one, torch.OutOfMemoryError))
    return End("error", 1, error, next(behind, None))


def out_of_time() -> End:
    """Return the end of a script as it stands now, asked by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return End("seconds", 0, where=_where(traceback.extract_stack(frame)) if frame else "")


def _where(frames: Iterable[traceback.FrameSummary]) -> str:
    found = [frame for frame in frames if is_user_file(frame.filename)]
    return f"{Path(found[-1].filename).name}:{found[-1].lineno} ({found[-1].name})" if found else ""


def described(error: BaseException) -> str:
    """Describe an error, with a remedy if there is one that the error does not name."""
    text = f"{type(error).__name__}: {error}"
    if any(type(one).__name__ == "TritonMissing" for one in followed(error, everything=True)):
        text += (
            "\ntorch.compile needs triton on the simulated device too: install it (pip install triton) beside the "
            "torch that runs this, name another Python that has it with --python, or compile nothing "
            "(TORCH_COMPILE_DISABLE=1)"
        )
    return text


def _status(exit_: SystemExit) -> int:
    """Return the status with which the interpreter would end."""
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
