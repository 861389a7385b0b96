"""What is watched while a script runs on the simulated device: peaks, and requests that failed.

Nothing here allocates on the device or holds a tensor."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.cuda.memory as torch_memory


class Stopped(BaseException):
    """Ends the script from within: no error of its own, so that `except Exception` lets it pass."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Failed(NamedTuple):
    """A request that the device could not serve."""

    asked: int
    allocated: int  # bytes of tensors at that moment


class Peaks:
    """The most that was allocated and reserved on a device since the beginning, whatever the script resets."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.retries = 0
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
        """Takes the allocator's figures over; `accumulated`: its counts too, which go on from 0 or are at their end."""
        if not torch.cuda.is_initialized():
            return
        for device in range(torch.cuda.device_count()):
            now = torch.cuda.memory_stats(device)
            self.allocated = max(self.allocated, now.get("allocated_bytes.all.peak", 0))
            self.reserved = max(self.reserved, now.get("reserved_bytes.all.peak", 0))
            if accumulated:
                self.retries += now.get("num_alloc_retries", 0)


class Requests:
    """Those that failed. The allocator tells while all that is allocated still lives."""

    def __init__(self) -> None:
        self.failed: list[Failed] = []
        # The allocator knows observers once CUDA is initialised, which is the script's business.
        torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(self._tell))

    def _tell(self, device: int, asked: int, total: int, free: int) -> None:
        allocated = torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0)
        self.failed.append(Failed(asked, allocated))
