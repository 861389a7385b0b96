"""memopt's allocator, given the requests that a recorded run made."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memopt import _C
from memopt._memory.recording.recording import Recording


class PoolReplay(NamedTuple):
    """Bytes. live: the most that lived at once. held: the most that the allocator had taken of a device with plenty.
    smallest_device: on which the run completes."""

    live: int
    held: int
    smallest_device: int


def trace_of(recording: Recording) -> bytes:
    """The recording's births and deaths as a trace (`python -m memopt replay`), its steps marked."""
    born, died, size = (recording.columns[name] for name in ("born", "died", "size"))
    there = size > 0
    numbers = torch.arange(len(size))[there]
    births = torch.stack((born[there], numbers, size[there]), 1).tolist()
    ended = there & (died < recording.events)
    deaths = torch.stack((died[ended], torch.arange(len(size))[ended]), 1).tolist()
    steps = [mark.event for mark in recording.marks if mark.kind == "step"]
    # One event is one birth or one death; the mark of a step stands behind its event.
    lines = [(at, 0, f"a {number} {nbytes} 0") for at, number, nbytes in births]
    lines += [(at, 0, f"f {number} 0") for at, number in deaths]
    lines += [(at, 1, "s") for at in steps]
    return "".join(f"{text}\n" for _, _, text in sorted(lines, key=lambda line: line[:2])).encode()


def replay(recording: Recording) -> PoolReplay:
    trace = trace_of(recording)

    plenty = _C.replay(trace, 0, 20, 0, True, True, False, False, -1, False)
    least = _C.replay(trace, 0, 20, 0, True, True, False, False, -1, True)
    return PoolReplay(plenty["live_peak"], plenty["peak_reserved"], least["frontier"])
