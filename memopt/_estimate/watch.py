"""Measurement of a script on the simulated device: peaks, and requests that failed.

Nothing here allocates on the device or holds a tensor.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.cuda.memory as torch_memory


class Stopped(BaseException):
    """Ends the script from within. It is not an Exception, so that `except Exception` lets it pass."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Failed(NamedTuple):
    """A request that the device could not serve."""

    asked: int
    allocated: int  # bytes of tensors at that moment
    gradients: bool  # are recorded


class AllocatedMemory(NamedTuple):
    """Memory of the current device: bytes and blocks that are allocated, and the number of blocks ever allocated."""

    bytes: int
    blocks: int
    ever: int


def memory() -> AllocatedMemory:
    if not torch.cuda.is_initialized():
        return AllocatedMemory(0, 0, 0)
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocation.all.current", "allocation.all.allocated"
    return AllocatedMemory(*(stats.get(name, 0) for name in names))


def growth(seen: list[AllocatedMemory]) -> int:
    """Return the bytes that each iteration adds once the loop's variables exist; 0 if some iteration adds no blocks."""
    steps = [
        (after.bytes - before.bytes, after.blocks - before.blocks)
        for before, after in itertools.pairwise(seen)
    ]
    last = steps[-2:]
    return min(size for size, _ in last) if len(last) == 2 and min(map(min, last)) > 0 else 0


class Peaks:
    """The most that was allocated and reserved on a device since the beginning, whatever the script resets."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, int]] = {}  # by device: allocated, reserved
        self.retries = 0
        for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
            self._before(torch_memory, name)
            setattr(torch.cuda, name, getattr(torch_memory, name))
        self._before(torch.accelerator, "reset_peak_memory_stats")
        self._before(torch.accelerator, "reset_accumulated_memory_stats")

    def _before(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def reset(*args: Any, **kwargs: Any) -> Any:
            self.note(accumulated="accumulated" in name)
            return original(*args, **kwargs)

        setattr(owner, name, reset)

    def note(self, accumulated: bool = True) -> None:
        """Add the allocator's figures; `accumulated`: its counts too, which restart from 0 or are at their end."""
        if not torch.cuda.is_initialized():
            return
        for device in range(torch.cuda.device_count()):
            now = torch.cuda.memory_stats(device)
            allocated, reserved = self.of.get(device, (0, 0))
            self.of[device] = (
                max(allocated, now.get("allocated_bytes.all.peak", 0)),
                max(reserved, now.get("reserved_bytes.all.peak", 0)),
            )
            if accumulated:
                self.retries += now.get("num_alloc_retries", 0)

    @property
    def allocated(self) -> int:
        return max((allocated for allocated, _ in self.of.values()), default=0)

    @property
    def reserved(self) -> int:
        return max((reserved for _, reserved in self.of.values()), default=0)


class Requests:
    """Failed requests. The allocator reports them while everything allocated is still alive."""

    def __init__(self) -> None:
        self.failed: list[Failed] = []
        # The allocator knows observers once CUDA is initialised, which is the script's business.
        torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(self._tell))

    def _tell(self, device: int, asked: int, total: int, free: int) -> None:
        allocated = torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0)
        self.failed.append(Failed(asked, allocated, torch.is_grad_enabled()))
