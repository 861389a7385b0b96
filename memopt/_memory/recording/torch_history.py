"""The history in a torch snapshot (torch.cuda.memory._snapshot(), or a file of one) as blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memopt import _C
from memopt._memory.recording.recording import OTHER, Frame, Mark, Stack, pair_events
from memopt._memory.recording.snapshot_file import blocks_of, integer, text

_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass
class History:
    """The history of one device.

    `columns` as a recording's, except that "module" is an index into `labels`: metadata that the program had set
    (torch.cuda.memory._set_memory_metadata) when it requested the block.
    """

    columns: dict[str, torch.Tensor]
    times_us: torch.Tensor
    stacks: list[Stack]
    labels: list[str]
    ooms: list[Mark]
    asked: list[
        tuple[int, int]
    ]  # of the requests that failed, one each of `ooms`: bytes, an index into `stacks`
    reserved_events: torch.Tensor
    reserved_bytes: torch.Tensor


class _Table:
    """Values by number, each once; number 0 is the empty one."""

    def __init__(self, empty: Any) -> None:
        self.items = [empty]
        self._numbers = {empty: 0}

    def number(self, item: Any) -> int:
        number = self._numbers.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class _StackTable(_Table):
    """Stacks as torch writes them: a list for each entry, of frames that are the same dicts in many of them, by whose
    identities a stack is known while the snapshot lives."""

    def __init__(self) -> None:
        super().__init__(())
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, frames: list[dict[str, Any]]) -> int:
        same = tuple(map(id, frames))
        known = self._known.get(same)
        if known is None:
            stack = tuple(Frame(text(f["filename"]), integer(f["line"]), text(f["name"])) for f in frames)
            known = self._known[same] = self.number(stack)
        return known


def read(snapshot: dict[str, Any], device: int) -> History:
    """Read a device's history. Raise ValueError if the snapshot is not in torch's format."""
    try:
        return _read(snapshot, device)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"its history is not in torch's format: {type(error).__name__}: {error!s:.200}"
        ) from None


def _read(snapshot: dict[str, Any], device: int) -> History:
    trace = snapshot["device_traces"][device] if device < len(snapshot["device_traces"]) else []
    segments = [segment for segment in snapshot.get("segments", []) if segment["device"] == device]
    stacks, labels = _StackTable(), _Table("")
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
    is_birth = torch.tensor([entry["action"] == "alloc" for entry in entries], dtype=torch.bool)
    told: dict[str, torch.Tensor] = {
        "address": _column(entry["addr"] for entry in entries),
        "size": _column(entry["size"] for entry in entries),
        "stream": _column(entry["stream"] for entry in entries),
        "stack": _column(
            stacks.of(entry.get("frames") or []) if entry["action"] == "alloc" else 0 for entry in entries
        ),
        "module": _column(
            labels.number(text(entry.get("user_metadata") or "")) if entry["action"] == "alloc" else 0
            for entry in entries
        ),
    }
    born, died, event = pair_events(is_birth, told["address"])
    columns = {name: column[event] for name, column in told.items()}
    columns |= {"born": born, "died": died}
    alive = set(columns["address"][died == len(entries)].tolist())
    before = list(_blocks(segments, alive))
    columns = {
        name: torch.cat((_column(block[name] for block in before), column))
        for name, column in columns.items()
        if name not in ("born", "died", "stack", "module")
    } | {
        "born": torch.cat((torch.full((len(before),), -1), columns["born"])),
        "died": torch.cat((torch.full((len(before),), len(entries)), columns["died"])),
        "stack": torch.cat((_column(stacks.of(block["frames"]) for block in before), columns["stack"])),
        "module": torch.cat((torch.zeros(len(before), dtype=torch.int64), columns["module"])),
    }
    columns["category"] = torch.full_like(columns["born"], OTHER)
    asked = [
        (integer(entry["size"]), stacks.of(entry.get("frames") or []))
        for entry in trace
        if entry["action"] == "oom"
    ]
    reserved = _reserved(trace, sum(integer(segment["total_size"]) for segment in segments))
    return History(
        columns=columns,
        times_us=_column(entry.get("time_us", 0) for entry in entries),
        stacks=stacks.items,
        labels=labels.items,
        ooms=_ooms(trace),
        asked=asked,
        reserved_events=reserved[0],
        reserved_bytes=reserved[1],
    )


def _column(values: Any) -> torch.Tensor:
    return torch.tensor([integer(value) for value in values], dtype=torch.int64)


def _blocks(segments: list[dict[str, Any]], known: set[int]) -> Any:
    """Yield the blocks that are alive at the end and not `known` by their address: they were there before."""
    for segment in segments:
        for at, block in blocks_of(segment):
            if block["state"] == "active_allocated" and at not in known:
                yield {
                    "address": at,
                    "size": block.get("requested_size", block["size"]),
                    "stream": segment["stream"],
                    "frames": block.get("frames") or [],
                }


def _ooms(trace: list[dict[str, Any]]) -> list[Mark]:
    found, events = [], 0
    for entry in trace:
        if entry["action"] == "oom":
            found.append(Mark(events - 1, "oom", f"requested {_C.format_size(entry['size'])}"))
        elif entry["action"] in ("alloc", "free_requested"):
            events += 1
    return found


def _reserved(trace: list[dict[str, Any]], at_end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the allocator's memory from each event on; a segment begins with the block that it was taken for.

    Empty if the history contradicts the segments at its end: it would have held less than nothing.
    """
    changes: dict[int, int] = {}
    events = 0
    for entry in trace:
        sign = _GROWS.get(text(entry["action"]))
        if sign is not None:
            changes[events] = changes.get(events, 0) + sign * integer(entry["size"])
        elif entry["action"] in ("alloc", "free_requested"):
            events += 1
    at = torch.tensor([-1, *changes], dtype=torch.int64)
    sums = torch.tensor([0, *changes.values()], dtype=torch.int64).cumsum(0)
    held = sums + (at_end - int(sums[-1]))
    known = len(at) if bool((held >= 0).all()) else 0
    return at.clamp(max=max(events - 1, -1))[:known], held[:known]
