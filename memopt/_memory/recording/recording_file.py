"""Recordings in files: .mopt, memopt's own format, and snapshots of torch's (torch.cuda.memory._dump_snapshot()).

A .mopt file is a zip: `recording.json` holds everything but the columns ({"format": "memopt recording", "version": 1,
"recordings": [...]}), and "0/born", "0/died", … the columns of the first recording, "1/born", … of the second, as
little-endian int64. Nothing in a file is ever executed. Sizes are checked before they are read, and references before
they are followed.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memopt import _C
from memopt._memory.recording import snapshot_file, torch_history
from memopt._memory.recording.recording import COLUMNS, Frame, Mark, Recording

FORMAT, VERSION = "memopt recording", 1
_EXTRA = ("times_us", "reserved_events", "reserved_bytes")
_TEXT = ("device", "source")
# Bytes of columns in a file: what memopt writes is a few times what it takes in its zip. A small file that says
# gigabytes is one that was made to fill the memory.
_MOST_BYTES, _MOST_RATIO = 256 << 20, 100
_MOST_JSON = 1 << 30
_MOST_DEVICES = 1 << 16
_MOST_SIZE = 1 << 56  # bytes of a block: sums of 64 of them still are int64, and devices have less
_MOST_ADDRESS = 1 << 62  # with a block's size it still is int64; processes and devices have 57 bits


def save(recordings: Recording | Sequence[Recording], path: str | Path) -> None:
    """Write a .mopt file, whole or not at all."""
    made = [recordings] if isinstance(recordings, Recording) else list(recordings)
    head = {"format": FORMAT, "version": VERSION, "recordings": [_head(recording) for recording in made]}
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("recording.json", json.dumps(head))
            for n, recording in enumerate(made):
                for name, values in _columns(recording).items():
                    archive.writestr(f"{n}/{name}", _bytes(values))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | Path) -> Recording:
    """Return a file's recording; of several (devices), the one with the highest peak.

    Raises ValueError, which names the file and the fault, if it is not in memopt's or torch's format, OSError if it
    cannot be read.
    """
    return max(load_all(path), key=lambda recording: recording.peak()[0])


def load_all(path: str | Path) -> list[Recording]:
    """Return all recordings of a file, one for each device: at least one. Raises as load() does."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        if start[:2] == b"PK":
            found = _load(path)
        elif snapshot_file.is_pickle(start):
            found = from_snapshot(snapshot_file.load(Path(path).read_bytes()))
        else:
            raise ValueError(
                "it is neither a memopt recording (.mopt) nor a torch snapshot (.pickle)"
                + (": it is empty" if not start else "")
            )
        if not found:
            raise ValueError("it holds no recording")
        return [_checked(recording) for recording in found]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(recording: Recording) -> Recording:
    """The recording, with texts that any encoding can write: a file may say half of a character. ValueError for numbers
    that no device has."""
    size = recording.columns["size"]
    if len(size) and not (int(size.min()) >= 0 and float(size.double().sum()) < _MOST_SIZE):
        raise ValueError("it has blocks of impossible sizes")
    address = recording.columns["address"]
    if len(address) and not (int(address.min()) >= 0 and int(address.max()) < _MOST_ADDRESS):
        raise ValueError("it has blocks at impossible addresses")
    return replace(
        recording,
        device=_text(recording.device),
        source=_text(recording.source),
        stacks=[
            tuple(Frame(_text(one.file), one.line, _text(one.function)) for one in stack)
            for stack in recording.stacks
        ],
        modules=[_text(name) for name in recording.modules],
        marks=[Mark(mark.event, _text(mark.kind), _text(mark.text)) for mark in recording.marks],
        facts=json.loads(_text(json.dumps(recording.facts, ensure_ascii=False))),
    )


def _text(text: str) -> str:
    return text if text.isascii() else text.encode(errors="replace").decode()


# ---- memopt's own form -----------------------------------------------------------------------------------------------


def _head(recording: Recording) -> dict[str, Any]:
    return {
        "device": recording.device,
        "source": recording.source,
        "capacity": recording.capacity,
        "facts": recording.facts,
        "modules": recording.modules,
        "marks": recording.marks,
        **_frames(recording),
        "lengths": {name: len(column) for name, column in _columns(recording).items()},
    }


def _frames(recording: Recording) -> dict[str, Any]:
    """Return each frame once; a stack is a list of their numbers."""
    frames: dict[Frame, int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in recording.stacks]
    return {"frames": list(frames), "stacks": stacks}


def _columns(recording: Recording) -> dict[str, torch.Tensor]:
    return recording.columns | {name: getattr(recording, name) for name in _EXTRA}


def _bytes(column: torch.Tensor) -> bytes:
    # Not contiguous(): a tensor of one element is that with any stride.
    values = torch.empty(len(column), dtype=torch.int64).copy_(column).view(torch.uint8)
    if sys.byteorder == "big":
        values = values.view(-1, 8).flip(1).contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel())


def _load(path: str | Path) -> list[Recording]:
    try:
        with zipfile.ZipFile(path) as archive:
            head = _json(archive)
            most = budget = _MOST_BYTES + _MOST_RATIO * Path(path).stat().st_size
            found = []
            for n, described in enumerate(_list(head, "recordings", dict)):
                columns: dict[str, torch.Tensor] = {}
                lengths = described.get("lengths")
                for name in (*COLUMNS, *_EXTRA):
                    length = lengths.get(name) if isinstance(lengths, dict) else None
                    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
                        raise ValueError(f"it does not state the length of the column {name!r}")
                    budget -= 8 * length
                    if budget < 0:
                        raise ValueError(
                            f"its columns take more than {_C.format_size(most)}, which is too much for its size"
                        )
                    columns[name] = _column(archive, f"{n}/{name}", length)
                found.append(_recording(described, columns))
            return found
    except _DAMAGE as error:
        raise ValueError(f"it is damaged or cut short: {error or type(error).__name__}") from None


# What zipfile and zlib raise on files that are none: an OSError where they seek to where nothing can be, a RuntimeError
# for what is encrypted, a NotImplementedError for another compression.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    KeyError,
    OverflowError,
)


def _json(archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        info = archive.getinfo("recording.json")
    except KeyError:
        raise ValueError("it is a zip file, but not a recording: it has no recording.json") from None
    if info.file_size > _MOST_JSON:
        raise ValueError(f"its recording.json is more than {_C.format_size(_MOST_JSON)}")
    try:
        head = json.loads(_content(archive, "recording.json", info.file_size))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its recording.json is not valid JSON: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("it is a zip file, but not a memopt recording")
    if head.get("version") != VERSION:
        raise ValueError(
            f"its version is {head.get('version')!r}, but this memopt reads {VERSION}: use the memopt that wrote it"
        )
    return head


def _content(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """Return exactly that many bytes, even if there are more."""
    with archive.open(name) as file:
        content = file.read(size)
        if len(content) != size or file.read(1):
            raise ValueError(f"its {name} does not have the stated length")
    return content


def _column(archive: zipfile.ZipFile, name: str, length: int) -> torch.Tensor:
    if archive.getinfo(name).file_size != 8 * length:
        raise ValueError(f"its {name} does not have the stated length")
    if not length:
        return torch.empty(0, dtype=torch.int64)
    content = bytearray(_content(archive, name, 8 * length))
    if sys.byteorder == "big":
        content = bytearray(_bytes(torch.frombuffer(content, dtype=torch.int64)))
    return torch.frombuffer(content, dtype=torch.int64).clone()


def _recording(described: dict[str, Any], columns: dict[str, torch.Tensor]) -> Recording:
    texts = {name: described.get(name) for name in _TEXT}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("it does not name its device")
    capacity, facts = described.get("capacity"), described.get("facts")
    if not (capacity is None or (_is_int(capacity) and capacity >= 0)) or not isinstance(facts, dict):
        raise ValueError("its capacity or its facts are not what memopt writes")
    extra = {name: columns.pop(name) for name in _EXTRA}
    events = len(extra["times_us"])
    if len(extra["reserved_events"]) != len(extra["reserved_bytes"]) or (extra["reserved_bytes"] < 0).any():
        raise ValueError("its reserved memory is not what memopt writes")
    marks = [Mark(*mark) for mark in _list(described, "marks", list) if _is_mark(mark, events)]
    return Recording(
        device=str(texts["device"]),
        source=str(texts["source"]),
        columns=columns,
        stacks=_stacks(described),
        modules=_list(described, "modules", str),
        marks=marks,
        capacity=capacity,
        facts=facts,
        **extra,
    )


def _stacks(described: dict[str, Any]) -> list[tuple[Frame, ...]]:
    frames = []
    for frame in _list(described, "frames", list):
        if len(frame) != 3 or not (
            isinstance(frame[0], str) and _is_int(frame[1]) and isinstance(frame[2], str)
        ):
            raise ValueError(f"{frame!r:.100} is not a source line")
        frames.append(Frame(*frame))
    found = []
    for stack in _list(described, "stacks", list):
        if not all(_is_int(number) and 0 <= number < len(frames) for number in stack):
            raise ValueError("one of its stacks refers to missing lines")
        found.append(tuple(frames[number] for number in stack))
    return found


def _list(described: dict[str, Any], name: str, of: type) -> list[Any]:
    found = described.get(name)
    if not isinstance(found, list) or not all(type(item) is of for item in found):
        raise ValueError(f"its {name!r} are not what memopt writes")
    return found


def _is_int(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_mark(mark: list[Any], events: int) -> bool:
    if len(mark) != 3 or not (_is_int(mark[0]) and isinstance(mark[1], str) and isinstance(mark[2], str)):
        raise ValueError(f"{mark!r:.100} is not a mark")
    if not -1 <= mark[0] <= events:
        raise ValueError(f"{mark!r:.100} is at an event that does not exist")
    return True


# ---- torch's ---------------------------------------------------------------------------------------------------------


def from_snapshot(snapshot: dict[str, Any]) -> list[Recording]:
    """Return a recording for each device of a torch snapshot that has blocks or a history.

    Metadata that the program had set (torch.cuda.memory._set_memory_metadata) takes the place of a module's name.
    Raises ValueError for a snapshot that is not in torch's format.
    """
    try:
        devices = {snapshot_file.integer(segment["device"]) for segment in snapshot.get("segments", [])}
        devices |= {n for n, trace in enumerate(snapshot["device_traces"]) if trace}
        ordered = sorted(devices)
        if ordered and not 0 <= ordered[0] <= ordered[-1] < _MOST_DEVICES:
            raise ValueError("its segments have impossible device numbers")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not in torch's format: {type(error).__name__}: {error}") from None
    found = []
    for device in ordered:
        history = torch_history.read(snapshot, device)
        found.append(
            Recording(
                device=f"cuda:{device}",
                source="a torch snapshot, which does not say what memory is used for",
                columns=history.columns,
                times_us=history.times_us,
                stacks=history.stacks,
                modules=history.labels,
                marks=history.ooms,
                reserved_events=history.reserved_events,
                reserved_bytes=history.reserved_bytes,
            )
        )
    return found
