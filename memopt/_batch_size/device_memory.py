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
    """The bytes of a trial: `peak` of live tensors, `held` of the device, `left` at the end of the step; `retries` of
    the allocator; `asked`: the sum of all requests of a step.
    """

    peak: int
    held: int
    left: int
    retries: int
    asked: int


class DeviceMemory(Protocol):
    """`total`: bytes of the device; `room`: the bytes that may be used after the headroom is subtracted."""

    name: str
    total: int
    room: int

    def begin(self) -> None:
        """Begin a trial: empty the cache and reset the peaks. Cycles of the last trial have been collected already."""

    def watching(self) -> AbstractContextManager[object]:
        """Return the context for each step."""

    def taken(self) -> TrialMemory:
        """Return the memory used since begin()."""

    def of_room(self, taken: TrialMemory) -> int:
        """Return the figure that `room` bounds."""

    def exceeded(self, taken: TrialMemory) -> str:
        """Return the reason why the memory used is too much, "" if it is not."""


def device_memory(device: torch.device, headroom: float, memory_budget: int | None) -> DeviceMemory:
    """Return the memory of a device. Raises ValueError for a device whose memory nothing counts."""
    if device.type == "cuda":
        return CudaMemory(device, headroom, memory_budget)
    if device.type == "cpu":
        return CpuMemory(headroom, memory_budget)
    raise ValueError(f"device={str(device)!r}: batch sizes are found on CUDA devices and on the CPU")


class CudaMemory:
    """The memory of a CUDA device by torch's counters, whichever allocator answers them.

    `held` is the device memory that the allocator holds, its cache and fragments included: a size at which it has to
    empty its cache within a step barely fits, and is slow.
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
            return f"{self._headroom:.0%} of {_C.format_size(self.total)} are not left free"
        return ""

    def _statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.cuda.memory_stats(self._index)
        return found

    def _empty_cache(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()


_ASKED = "requested_bytes.all.allocated"


class BudgetExceeded(MemoryError):
    """A step's tensors on the host exceeded their limit."""


class CpuMemory:
    """Live storages on the CPU, each counted once, including those that exist at the beginning.

    Kernels' workspaces and allocations of other threads are not seen. When the storages exceed the room, the step ends
    with an exception, since the kernel would kill the process.
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
                f"{_C.format_size(self.live)} of tensors on the CPU, where the limit is {_C.format_size(self.limit)}"
            )
        return out


def _available() -> int:
    """Bytes of the host that are free for this process, within its cgroup."""
    found = available(swap=False)
    if found is None:
        raise RuntimeError("the free memory of the host is not known here: give memory_budget=")
    return found
