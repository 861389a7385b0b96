"""Peaks of a whole run."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.cuda.memory as torch_memory


class Peaks:
    """The most that was allocated and reserved on a device since the beginning, whatever the script resets."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, int]] = {}  # by device: allocated, reserved
        self.retries = 0
        self._plans = False
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
        if self._plans or not torch.cuda.is_initialized():
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

    def leave_out_planning(self, begins: bool) -> None:
        """Begin, or end, to leave out what happens: trial steps, some of which run out of memory, are none of the
        script's."""
        if begins:
            self.note(accumulated=False)
        elif torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)
        self._plans = begins

    @property
    def allocated(self) -> int:
        return max((allocated for allocated, _ in self.of.values()), default=0)

    @property
    def reserved(self) -> int:
        return max((reserved for _, reserved in self.of.values()), default=0)
