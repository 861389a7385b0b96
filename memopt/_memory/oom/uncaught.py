"""The hook for uncaught exceptions: it prints the report of an out-of-memory error before the traceback. The exception,
its traceback and other hooks stay as they are."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from memopt._memory.oom import page
from memopt._memory.oom.observer import report_of

_before: dict[str, Callable[..., Any]] = {}  # what our hooks stand before
_ours: dict[str, Callable[..., Any]] = {}


def install() -> None:
    if _ours:
        return
    _before["sys"], _before["threading"] = sys.excepthook, threading.excepthook
    _ours["sys"], _ours["threading"] = _main, _thread
    sys.excepthook, threading.excepthook = _main, _thread


def remove() -> None:
    """Remove the hooks. A hook that was installed over ours stays, and still reaches the one before ours."""
    if not _ours:
        return
    if sys.excepthook is _main:
        sys.excepthook = _before["sys"]
    if threading.excepthook is _thread:
        threading.excepthook = _before["threading"]
    _ours.clear()


def show(error: BaseException | None) -> None:
    """Print the report in two writes, so that reports of several ranks hardly mix: memory held, then fixes."""
    report = None if error is None or not _ours else report_of(error)
    if report is None:
        return
    _say(f"{report}\n")  # what follows takes seconds, in which this process may be ended
    report = report.tried_out()
    text = "".join(f"{line}\n" for line in report.advice())
    wanted = os.environ.get("MEMOPT_REPORT")
    path = None
    if wanted and wanted.lower().endswith(page.SUFFIXES):
        path = page.free_path(wanted, report.rank)
        text += f"  Page        {path}\n"
    elif wanted:
        text += f"  Report      {_kept(str(report), wanted)}\n"
    if text:
        _say(text)
    if path is not None:
        failure = page.write(report, path)
        if failure:
            _say(f"  The page was not written: MEMOPT_REPORT={wanted}: {failure}\n")


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _kept(text: str, path: str) -> str:
    """Append the text to a file in one write, and return its path, or the reason why it could not be written."""
    try:
        with open(path, "a") as file:
            file.write(f"{text}\n")
    except OSError as error:
        return f"not written: MEMOPT_REPORT={path}: {error.strerror}"
    return path


def _main(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    try:
        show(error)
    finally:
        _before["sys"](kind, error, traceback)


def _thread(arguments: threading.ExceptHookArgs) -> None:
    try:
        show(arguments.exc_value)
    finally:
        _before["threading"](arguments)
