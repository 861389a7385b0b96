"""A recording as a torch snapshot, for tools that read those, such as memory_viz."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memopt._memory.recording.recording import Recording, Stack

_PROTOCOL = 4  # memory_viz shows nothing of a file in protocol 5


def write(recordings: Sequence[Recording], path: str | Path) -> None:
    Path(path).write_bytes(pickle.dumps(as_snapshot(recordings), protocol=_PROTOCOL))


def as_snapshot(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return these recordings in the format of torch.cuda.memory._snapshot(); a CPU counts as device 0.

    Segments are not known here: each block that is alive at the end becomes one.
    """
    devices = {_device(recording): recording for recording in recordings}
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(devices, default=-1) + 1)]
    segments: list[dict[str, Any]] = []
    for device, recording in devices.items():
        trace, live = _history(recording, device)
        traces[device] = trace
        segments += live
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _device(recording: Recording) -> int:
    _, _, index = recording.device.partition(":")
    return int(index) if index.isdecimal() else 0


def _history(recording: Recording, device: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    frames = list(map(_frames, recording.stacks))
    events = recording.events
    times = recording.times_us.tolist()
    at: list[list[dict[str, Any]]] = [[] for _ in range(events)]
    segments = []
    columns = ("born", "died", "address", "size", "stream", "stack", "module")
    for born, died, address, size, stream, stack, module in zip(
        *(recording.columns[name].tolist() for name in columns), strict=True
    ):
        entry = {"addr": address, "size": size, "stream": stream, "pool_id": (0, 0), "frames": frames[stack]}
        entry |= {"compile_context": "N/A", "user_metadata": recording.modules[module]}
        if born >= 0:
            at[born].append(entry | {"action": "alloc", "time_us": times[born]})
        if died < events:
            for action in ("free_requested", "free_completed"):
                at[died].append(entry | {"action": action, "time_us": times[died]})
        else:
            segments.append(_segment(device, address, size, stream, frames[stack]))
    return [entry for entries in at for entry in sorted(entries, key=_frees_first)], segments


def _frees_first(entry: dict[str, Any]) -> bool:
    return bool(entry["action"] == "alloc")


def _frames(stack: Stack) -> list[dict[str, Any]]:
    return [{"filename": frame.file, "line": frame.line, "name": frame.function} for frame in stack]


def _segment(
    device: int, address: int, size: int, stream: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    block = {"address": address, "size": size, "requested_size": size, "frames": frames}
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": stream,
        "segment_type": "large" if size > 1 << 20 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block | {"state": "active_allocated"}],
    }
