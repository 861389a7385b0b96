"""Trace of the allocator's requests, for `python -m memopt replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memopt import _C
from memopt.cuda._device_index import device_index

if TYPE_CHECKING:
    import torch

_CAPACITY = 1_000_000  # events, 64 bytes each


def record_trace(
    *,
    capacity: int = _CAPACITY,
    stacks: bool = False,
    clear: bool = True,
    device: torch.device | str | int | None = None,
) -> None:
    """Record the last events of memopt's allocator on a device from now on.

    Args:
        capacity: Number of events that are kept, 64 bytes of host memory each; at most 2**28. Another capacity than
            before drops the events kept so far.
        stacks: Whether to record the Python stack of each request, for all devices. This takes the GIL at every
            request, and some microseconds.
        clear: Whether to drop the events kept so far.
        device: A CUDA device, as torch takes it; by default the current one.

    Raises:
        memopt.Error: There is no such device.
        ValueError: The capacity is out of range.
    """
    _C.trace_start(device_index(device), capacity, stacks, clear)


def stop_trace(device: torch.device | str | int | None = None) -> None:
    """Stop recording events; those kept so far can still be saved.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.
    """
    _C.trace_stop(device_index(device))


def trace_step() -> None:
    """Mark the end of a training step, so that a replay can report figures for each step."""
    _C.trace_step()


def save_trace(path: str | Path, device: torch.device | str | int | None = None) -> None:
    """Write the recorded events in the text format that `python -m memopt replay` reads.

    Blocks that were live before the oldest kept event come first.

    Args:
        path: The file to write.
        device: A CUDA device, as torch takes it; by default the current one.
    """
    Path(path).write_bytes(_C.trace_text(device_index(device)))
