"""A recording as a trace of counters, in the format of Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memopt._memory.recording.recording import CATEGORIES, Recording

_POINTS = 100_000  # of one counter; of more events the highest of each stretch is shown


def write(recordings: Sequence[Recording], path: str | Path) -> None:
    Path(path).write_text(json.dumps(as_trace(recordings)))


def as_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for number, recording in enumerate(recordings):
        process = {"pid": recording.facts.get("pid", number), "tid": number}
        name = {"name": f"{recording.device}: {recording.source}"}
        events.append({"ph": "M", "name": "thread_name", "args": name} | process)
        events += _counters(recording, process) if recording.events else []
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(recording: Recording, process: dict[str, int]) -> list[dict[str, Any]]:
    by_category = torch.stack([recording.live_bytes(n)[1:] for n in range(len(CATEGORIES))])
    shown = highest(by_category.sum(0), _POINTS)
    times = recording.times_us[shown].tolist()

    found: list[dict[str, Any]] = [
        {
            "ph": "C",
            "name": f"memory of {recording.device}",
            "ts": time,
            "args": dict(zip(CATEGORIES, row, strict=True)),
        }
        | process
        for time, row in zip(times, by_category[:, shown].t().tolist(), strict=True)
    ]
    held = zip(
        recording.times_us[recording.reserved_events.clamp(min=0)].tolist(),
        recording.reserved_bytes.tolist(),
        strict=True,
    )
    found += [
        {"ph": "C", "name": f"held on {recording.device}", "ts": time, "args": {"bytes": size}} | process
        for time, size in held
    ]
    for mark in recording.marks:
        at = int(recording.times_us[min(max(mark.event, 0), recording.events - 1)])
        found.append(
            {"ph": "i", "s": "p", "name": mark.kind, "ts": at, "args": {"text": mark.text}} | process
        )
    return found


def highest(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return indices of at most about `most` values, in order: all, or of each stretch the highest and the last."""
    count = len(values)
    if count <= most:
        return torch.arange(count)
    width = -(-2 * count // most)
    padded = torch.full((-(-count // width) * width,), torch.iinfo(torch.int64).min)
    padded[:count] = values
    starts = torch.arange(0, len(padded), width)
    peaks = starts + padded.view(-1, width).argmax(1)
    return torch.cat((peaks, (starts + width - 1).clamp(max=count - 1))).unique()
