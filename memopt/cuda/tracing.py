"""A record of what the allocator was asked for, to be replayed (python -m memopt replay)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memopt import _C
from memopt.cuda.device_index import device_index

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
    """Keeps the last `capacity` events of memopt's allocator on a device from now on, 64 bytes of host memory each.

    stacks: note the Python stack of each request, for all devices. This takes the GIL at every request, and some
    microseconds. clear: forget what was kept before. A `capacity` other than the last one's forgets it, too.
    Raises memopt.Error where there is no such device, ValueError for a capacity below 1 or above 2**28."""
    _C.trace_start(device_index(device), capacity, stacks, clear)


def stop_trace(device: torch.device | str | int | None = None) -> None:
    """Ends record_trace(). What was kept can still be saved."""
    _C.trace_stop(device_index(device))


def trace_step() -> None:
    """Says that a training step ends here, so that a replay can give its figures by step."""
    _C.trace_step()


def save_trace(path: str | Path, device: torch.device | str | int | None = None) -> None:
    """Writes what was kept in the plain form that `python -m memopt replay` reads. Blocks that were live before the
    oldest event that was kept begin the trace."""
    Path(path).write_bytes(_C.trace_text(device_index(device)))
