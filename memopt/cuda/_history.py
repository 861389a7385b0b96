"""torch's memory history (torch.cuda.memory._record_memory_history) for memopt's allocator, from its trace."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from memopt import _C
from memopt._runtime.log import stacklevel

# Events that are kept where torch asks for all there ever were: 64 bytes each, taken as they come. The C side says why.
_MOST = 1 << 28
_ALL = -1  # devices

Frames = list[dict[str, Any]]


@dataclass(frozen=True)
class _Recording:
    """The request of record_memory_history().

    `events`: record a history, not only live blocks; `skip`: torch's names of events to leave out.
    """

    events: bool
    stacks: bool
    capacity: int
    skip: frozenset[str]


_lock = threading.Lock()
_recording: _Recording | None = None


def is_recording() -> bool:
    """Replacement of torch._C._cuda_isHistoryEnabled."""
    return _recording is not None


def record(
    enabled: str | None,
    context: str | None,
    max_entries: int,
    clear: bool,
    skip: Collection[str] = (),
) -> None:
    """Begin, change or end recording, with torch's meaning of the arguments.

    Python frames are recorded, C++ frames are not.
    """
    global _recording
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected state to be 'state', 'all', or None")
    if context not in (None, "state", "alloc", "all"):
        raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
    for name in skip:
        if name not in _TORCH_ACTIONS:
            raise RuntimeError(f"Unknown TraceEntry action: {name}")
    with _lock:
        if enabled is None:
            _recording = None
            _C.trace_stop(_ALL)
            return
        capacity = max(1, min(max_entries, _MOST))
        wanted = _Recording(enabled == "all", context is not None, capacity, frozenset(skip))
        _C.trace_start(_ALL, capacity, wanted.stacks, clear)
        _recording = wanted


def refuse_host_history(wanted: bool) -> None:
    """Warn that the history of pinned memory is not recorded: torch records it with its own device allocator only."""
    if wanted:
        warnings.warn(
            "record_pinned_host_memory has no effect under memopt's allocator: torch records the history of pinned "
            "memory only together with its own device allocator",
            RuntimeWarning,
            stacklevel=stacklevel(),
        )


# ---- reading ---------------------------------------------------------------------------------------------------------


class _FrameCache:
    """Frames by the number of a stack; each made once, so that a pickle holds it once."""

    def __init__(self) -> None:
        self._known: dict[int, Frames] = {0: []}

    def __getitem__(self, stack: int) -> Frames:
        if stack not in self._known:
            self._known[stack] = [
                {"name": name, "filename": file, "line": line} for file, name, line in _C.trace_stack(stack)
            ]
        return self._known[stack]


def frames(device: int) -> dict[int, Frames]:
    """Return by address the frames that allocated each live block whose request is still in the trace."""
    if _recording is None or not _recording.stacks:
        return {}
    found: dict[int, Frames] = {}
    stacks = _FrameCache()
    for action, _, _, address, _, _, _, stack in _C.trace_read(device):
        if action == "alloc":
            found[address] = stacks[stack]
        elif action == "free":
            found.pop(address, None)
    return found


def traces(version: tuple[int, int]) -> list[list[dict[str, Any]]]:
    """Return torch's device_traces, one list for each device."""
    import torch

    if _recording is None or not _recording.events:
        return [[] for _ in range(torch.cuda.device_count())]
    recording, stacks = _recording, _FrameCache()
    return [
        [
            entry
            for entry in _entries(device, recording, stacks, version)
            if entry["action"] not in recording.skip
        ]
        for device in range(torch.cuda.device_count())
    ]


# What torch calls an event; memopt frees at once what torch first hears of and then completes. What is not here has
# no counterpart: record_stream, a stream's wait, the beginning of a step.
_ACTIONS = {
    "alloc": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "map": ("segment_map",),
    "unmap": ("segment_unmap",),
    "oom": ("oom",),
}
_TORCH_ACTIONS = {
    "alloc",
    "free_requested",
    "free_completed",
    "oom",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
}


def _entries(
    device: int, recording: _Recording, stacks: _FrameCache, version: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    for action, nanoseconds, _, address, size, stream, pool, stack in _C.trace_read(device):
        for name in _ACTIONS.get(action, ()):
            entry: dict[str, Any] = {
                "action": name,
                "device_free" if name == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": nanoseconds // 1000,
                "compile_context": "N/A",
                "user_metadata": "",
            }
            if version >= (2, 12):
                entry["pool_id"] = pool
            if recording.stacks:
                entry["frames"] = stacks[0 if action == "free" else stack]  # the stack of a free is not taken
            yield entry


def traceback_of(address: int) -> Frames | None:
    """Replacement of torch._C._cuda_allocationTraceback.

    Returns the stack that allocated the live block at that address, None where it is not known.
    """
    import torch

    for device in range(torch.cuda.device_count()):
        found = frames(device).get(address)
        if found is not None:
            return found
    return None
