"""The memory that a trial of a batch size takes of a device, and the most that it may take."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memopt import _C
from memopt._checkpoint.stages.costs import Meter
from memopt._runtime.host_memory import available


@dataclass(frozen=True)
class TrialMemory:
    """The bytes of a trial: `peak` of tensors at the most, `held` of the device, `left` when the step is over.

    `retries` of the allocator; `asked`: all that a step asked for, one after the other.
    """

    peak: int
    held: int
    left: int
    retries: int
    asked: int


class DeviceMemory(Protocol):
    """`total`: bytes of the device; `room`: those that may be taken, once the headroom is off."""

    name: str
    total: int
    room: int

    def begin(self) -> None:
        """Begin a trial: nothing cached, peaks as of now. What the last one left in cycles is gone already."""

    def watching(self) -> AbstractContextManager[object]:
        """A context around each step."""

    def taken(self) -> TrialMemory:
        """Since begin()."""

    def of_room(self, taken: TrialMemory) -> int:
        """The bytes that `room` bounds."""

    def exceeded(self, taken: TrialMemory) -> str:
        """The reason why what was taken is too much, "" where it is not."""


def device_memory(device: torch.device, headroom: float, memory_budget: int | None) -> DeviceMemory:
    """ValueError for a device whose memory nobody counts."""
    if device.type == "cuda":
        return CudaMemory(device, headroom, memory_budget)
    if device.type == "cpu":
        return CpuMemory(headroom, memory_budget)
    raise ValueError(f"device={str(device)!r}: batch sizes are found on CUDA devices and on the CPU")


class CudaMemory:
    """The memory of a CUDA device by torch's counters, so by whichever allocator answers them.

    Held is what the allocator has of the device, its cache and what is in fragments there included: a size that makes
    it empty its cache in mid-step fits barely, and is slow at that.
    """

    def __init__(self, device: torch.device, headroom: float, memory_budget: int | None) -> None:
        torch.cuda.init()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.name = f"cuda:{self._index}"
        self._budget = memory_budget
        self._empty_cache()
        free, self.total = torch.cuda.mem_get_info(self._index)
        self._others = self.total - free - torch.cuda.memory_reserved(self._index)
        allowed = self.total
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if fraction is not None and torch.cuda.memory.get_allocator_backend() == "native":
            allowed = min(allowed, int(fraction(self._index) * self.total) + self._others)
        self._limit = int((1 - headroom) * allowed)
        self._headroom = headroom
        self.room = self._limit if memory_budget is None else min(self._limit, memory_budget + self._others)

    def begin(self) -> None:
        self._empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._start = self._statistics()

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def taken(self) -> TrialMemory:
        torch.cuda.synchronize(self._index)
        now = self._statistics()
        peak = torch.cuda.max_memory_allocated(self._index)
        held = max(torch.cuda.max_memory_reserved(self._index), peak) + self._others
        asked = now.get(_ASKED, 0) - self._start.get(_ASKED, 0)
        retries = now.get("num_alloc_retries", 0) - self._start.get("num_alloc_retries", 0)
        return TrialMemory(peak, held, torch.cuda.memory_allocated(self._index), retries, asked)

    def of_room(self, taken: TrialMemory) -> int:
        return taken.held if self.room == self._limit else taken.peak + self._others

    def exceeded(self, taken: TrialMemory) -> str:
        if self._budget is not None and taken.peak > self._budget:
            return f"{_C.format_size(taken.peak)} live at once, of a budget of {_C.format_size(self._budget)}"
        # Without headroom whatever has run has fitted.
        if self._headroom and taken.held > self._limit:
            return f"{self._headroom:.0%} of {_C.format_size(self.total)} are not free"
        return ""

    def _statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.cuda.memory_stats(self._index)
        return found

    def _empty_cache(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()


_ASKED = "requested_bytes.all.allocated"


class BudgetExceeded(MemoryError):
    """A step's tensors on the host were more than they may be."""


class CpuMemory:
    """Live storages on the CPU, each counted once, all that there are at the beginning among them.

    What a kernel works in, and what other threads make, is not seen. Where they become more than there is room for, the
    step ends with an exception: the kernel's way would be to kill the process.
    """

    name = "cpu"

    def __init__(self, headroom: float, memory_budget: int | None) -> None:
        self._meter = _Limited()
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None and tensor.is_cpu and tensor.layout is torch.strided:
                        self._meter.see(tensor.untyped_storage())
        if memory_budget is None:
            memory_budget = self._meter.live + _available()
        self.total = memory_budget
        self.room = self._meter.limit = int((1 - headroom) * memory_budget)

    def begin(self) -> None:
        self._meter.peak = self._meter.live
        self._meter.asked = 0

    def watching(self) -> AbstractContextManager[object]:
        return self._meter

    def taken(self) -> TrialMemory:
        meter = self._meter
        return TrialMemory(meter.peak, meter.peak, meter.live, 0, meter.asked)

    def of_room(self, taken: TrialMemory) -> int:
        return taken.peak

    def exceeded(self, taken: TrialMemory) -> str:
        return f"{_C.format_size(taken.peak)} live at once" if taken.peak > self.room else ""


class _Limited(Meter):
    def __init__(self) -> None:
        super().__init__()
        self.limit = 0
        self.asked = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile made is seen when it runs

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu":
            return
        before = self.live
        super().see(storage)
        self.asked += max(0, self.live - before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live > self.limit:
            raise BudgetExceeded(
                f"{_C.format_size(self.live)} of tensors on the CPU, where {_C.format_size(self.limit)} may be"
            )
        return out


def _available() -> int:
    """Bytes of the host that are free for this process, within its cgroup."""
    found = available(swap=False)
    if found is None:
        raise RuntimeError("what the host has free is not known here: give memory_budget=")
    return found
