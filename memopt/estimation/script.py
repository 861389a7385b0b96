"""A script run as `python script.py` runs it, in this process, and how it ended."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from memopt.estimation.watch import Stopped

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
        _as_main(argv, module)
    except Stopped as stopped:
        return End(stopped.why, 0)
    except SystemExit as exit_:
        return End("exit", _status(exit_))
    except BaseException as error:
        return End("error", 1, error, _out_of_memory(error))
    return End("end", 0)


def _as_main(argv: list[str], module: bool) -> None:
    sys.argv = list(argv)
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(argv[0])
    if os.path.isdir(path) or not Path(path).suffix.startswith(".py"):
        runpy.run_path(path, run_name="__main__")  # a folder or an archive with a __main__
        return
    sys.path[0] = os.path.dirname(path)
    # Not runpy's module, which is gone when the script ends: functions that run at exit, and pickles, want it.
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__file__, main.__loader__ = argv[0], loader
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _status(exit_: SystemExit) -> int:
    """As the interpreter would end with it."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def show(error: BaseException) -> None:
    """The traceback, from the script's first line on."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen")):
        tb = tb.tb_next
    traceback.print_exception(type(error), error, tb)
