"""Told by torch's allocator, or memopt's, of each request that is about to raise torch.OutOfMemoryError. What it has
gathered waits, as text, for the exception to turn out to be one that nobody catches."""

from __future__ import annotations

import re
import threading
import time
from collections import deque

import torch

from memopt.log import logger
from memopt.oom.recognition import followed
from memopt.oom.report import OomReport, gather

_SHARE = 0.05  # of the time since the first: what gathering may take where one out of memory follows another

_lock = threading.Lock()
_attached: set[str] = set()  # the allocators' names; torch has no way to detach
_listening = False
_reports: deque[OomReport] = deque(maxlen=8)
_first = _spent = 0.0


def listen() -> None:
    """From now on, and from CUDA's initialisation on where that is still to come."""
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
    """To the allocator that is in use then."""
    backend = torch.cuda.memory.get_allocator_backend()
    with _lock:
        if backend not in _attached:
            torch._C._cuda_attach_out_of_memory_observer(_tell)
            _attached.add(backend)


def _tell(device: int, asked: int, total: int, free: int) -> None:
    """What is raised here would take the out of memory's place."""
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
        logger.exception("the report of an out of memory failed")
    _spent += time.perf_counter() - now


def report_of(error: BaseException) -> OomReport | None:
    """That of an exception, or of the out of memory that it followed; None where it is none, or none was gathered."""
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
    """As torch writes it in the exception."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if nbytes <= 1024 ** (power + 1):
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes / 1024**3:.2f} GiB"
