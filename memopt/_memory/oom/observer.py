"""The observer of requests that are about to raise torch.OutOfMemoryError, under torch's allocator or memopt's.

The report that it gathers is kept as text until the exception turns out to be uncaught.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque

import torch

from memopt._memory.oom.recognition import followed
from memopt._memory.oom.report import OomReport, gather
from memopt._runtime.log import logger

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
