"""The observer of requests that are about to raise torch.OutOfMemoryError, under torch's allocator or memopt's, and the
hook that prints its report if nobody catches the exception.

The report is kept as text until then. It is printed after the traceback, where a reader looks first, and written to a
page if one is asked for; where another hook ends the process or waits, it is not, or later. The exception, its
traceback and other hooks stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memopt._memory.oom.exceptions import followed
from memopt._memory.oom.report import OomReport, gather
from memopt._memory.recording import recorder
from memopt._runtime.log import logger

if TYPE_CHECKING:
    from memopt._memory.oom.fixes import Fix
    from memopt._memory.oom.report import OomReport
    from memopt._memory.recording.recording import Recording

_SHARE = 0.05  # of the time since the first error: the share that gathering reports may take

_lock = threading.Lock()
_attached: set[str] = set()  # the allocators' names; torch has no way to detach
_listening = False
_reports: deque[OomReport] = deque(maxlen=8)
_first = _spent = 0.0


def listen() -> None:
    """Listen to failed requests from now on, or from CUDA's initialization on if that is still to come."""
    global _listening
    _listening = True
    # Called at once where CUDA is there already.
    torch.cuda._lazy_call(_attach)  # type: ignore[no-untyped-call]


def ignore() -> None:
    global _listening, _first, _spent
    _listening = False
    _reports.clear()
    _first = _spent = 0.0


def _attach() -> None:
    """Attach the observer to the allocator in use."""
    backend = torch.cuda.memory.get_allocator_backend()
    with _lock:
        if backend not in _attached:
            torch._C._cuda_attach_out_of_memory_observer(_tell)
            _attached.add(backend)


def _tell(device: int, asked: int, total: int, free: int) -> None:
    """Gather the report of an out-of-memory error; an exception raised here would replace that error, so none is."""
    global _first, _spent
    if not _listening:
        return
    now = time.perf_counter()
    _first = _first or now
    # A program that tries sizes until one fits, or a library that tries algorithms, must not wait for each.
    if _spent > 2 + _SHARE * (now - _first):
        return
    try:
        _reports.append(gather(device, asked))
    except Exception:
        logger.exception("the report of an out-of-memory error failed")
    _spent += time.perf_counter() - now


def report_of(error: BaseException) -> OomReport | None:
    """Return the report of an out-of-memory error, or of the one that an exception followed; None without a report."""
    cause = next((one for one in followed(error) if isinstance(one, torch.OutOfMemoryError)), None)
    if cause is None:
        return None
    wanted = _asked(str(cause))
    for report in reversed(_reports):
        if wanted is None or wanted == torch_size(report.asked):
            return report
    return None


def _asked(text: str) -> str | None:
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    return found[1] if found else None


def torch_size(nbytes: int) -> str:
    """Return a size as torch writes it in the exception."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if nbytes <= 1024 ** (power + 1):
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes / 1024**3:.2f} GiB"


# ---- uncaught exceptions ---------------------------------------------------------------------------------------------


_before: dict[str, Callable[..., Any]] = {}  # what our hooks stand before
_ours: dict[str, Callable[..., Any]] = {}


def install_hooks() -> None:
    if _ours:
        return
    _before["sys"], _before["threading"] = sys.excepthook, threading.excepthook
    _ours["sys"], _ours["threading"] = _main, _thread
    sys.excepthook, threading.excepthook = _main, _thread


def remove_hooks() -> None:
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
    if wanted and wanted.lower().endswith(SUFFIXES):
        path = free_path(wanted, report.rank)
        text += f"  Page        {path}\n"
    elif wanted:
        text += f"  Report      {_kept(str(report), wanted)}\n"
    if text:
        _say(text)
    if path is not None:
        failure = write_page(report, path)
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
        _before["sys"](kind, error, traceback)
    finally:
        show(error)


def _thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value  # the other hook may clear the arguments
    try:
        _before["threading"](arguments)
    finally:
        show(error)


# ---- the page --------------------------------------------------------------------------------------------------------
# The report of an out-of-memory error as a page: the recording, or else the memory that was live at that moment.
#
# It is written to a file of its own while the exception propagates, within some seconds, and does not change it.


SUFFIXES = (".html", ".htm")
_PAGE_SECONDS = 20.0  # a device that waits for another rank's would be waited for for ever
_MOST_EVENTS = 200_000  # some 2 s; of a longer recording the end is on the page


def free_path(wanted: str, rank: str) -> Path:
    """Return an unused path for each rank, so that nothing is overwritten. `rank`: as in the report, "rank 3 of 8"."""
    path = Path(wanted)
    if rank:
        path = path.with_stem(f"{path.stem}.rank{rank.split()[1]}")
    return path.with_stem(f"{path.stem}.{os.getpid()}") if path.exists() else path


def write_page(report: OomReport, path: Path) -> str:
    """Write the page and return "", or the reason why it could not be written."""
    failure = [f"it was not finished after {_PAGE_SECONDS:.0f} s"]

    def work() -> None:
        part = path.with_name(f".{path.name}.part")
        try:
            from memopt._memory.html import report_page
            from memopt._memory.recording.lower_peak import Suggestion

            text = report_page.html(
                _recordings(report),
                title="CUDA out of memory",
                first=report_page.section(
                    "What happened", report_page.folding_lines(str(replace(report, tried=None)))
                ),
                suggestions=[
                    Suggestion(fix.text, fix.peak, cost=fix.changes or "none") for fix in _fixes(report)
                ],
            )
            part.write_text(text, encoding="utf-8")
            part.replace(path)
            failure[0] = ""
        except Exception as error:
            logger.info("the page of an out-of-memory error failed", exc_info=True)
            failure[0] = f"{type(error).__name__}: {error}"
            part.unlink(missing_ok=True)

    thread = threading.Thread(target=work, name="memopt-oom-page", daemon=True)
    thread.start()
    thread.join(_PAGE_SECONDS)
    return failure[0]


def _fixes(report: OomReport) -> list[Fix]:
    return [] if report.tried is None else report.tried.fixes


def _recordings(report: OomReport) -> list[Recording]:
    active = recorder.active()
    device = report.bytes.device
    if active is None or device not in active.devices():
        return [report.contents]
    recording = active.recording(device)
    return [recording.since(recording.events - 1 - _MOST_EVENTS) if recording.blocks else report.contents]
