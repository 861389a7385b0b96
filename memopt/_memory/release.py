"""memopt.release(): memory that nothing needs any more is given back, and the holders of the rest are reported."""

from __future__ import annotations

import ctypes
import gc
import html
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memopt import _C
from memopt._memory.oom import exceptions
from memopt._offload import pinned_memory
from memopt._runtime.host_memory import resident_bytes
from memopt._runtime.results import Result

if TYPE_CHECKING:
    from memopt._memory.live.live_tensors import LiveTensors


@dataclass(frozen=True)
class AllocatorUse(Result):
    """Bytes of one device: in live tensors, and held by torch's allocator (0 on the CPU, which has no cache)."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, repr=False)
class Released(Result):
    """The result of memopt.release(). Print it, or show it in a notebook.

    Attributes:
        before: Bytes by device before the call.
        after: Bytes by device after it.
        resident_before_bytes: Resident host memory of the process before the call, in bytes.
        resident_after_bytes: Resident host memory after it.
        frames: Number of ended functions' frames that were cleared.
        live: The holders of the memory that is left.
    """

    before: dict[str, AllocatorUse]
    after: dict[str, AllocatorUse]
    resident_before_bytes: int
    resident_after_bytes: int
    frames: int
    live: LiveTensors = field(repr=False)

    @property
    def freed_bytes(self) -> dict[str, int]:
        """Bytes of tensors that were freed, by device."""
        return {
            device: max(0, there.allocated_bytes - self.after.get(device, _NOTHING).allocated_bytes)
            for device, there in self.before.items()
        }

    @property
    def returned_bytes(self) -> dict[str, int]:
        """Bytes that were given back to devices, and to the host ("host")."""
        devices = {
            device: max(0, there.reserved_bytes - self.after.get(device, _NOTHING).reserved_bytes)
            for device, there in self.before.items()
            if there.reserved_bytes
        }
        return {**devices, "host": max(0, self.resident_before_bytes - self.resident_after_bytes)}

    def __str__(self) -> str:
        return "\n".join([*self._lines(), str(self.live)])

    def _lines(self) -> list[str]:
        lines = [
            f"released: {_sizes(self.freed_bytes) or 'no tensor'}; given back: "
            f"{_sizes(self.returned_bytes) or 'nothing'}"
        ]
        if self.frames:
            lines[0] += f" ({self.frames} frames of functions that had returned were cleared)"
        for device, now in self.after.items():
            if now.reserved_bytes:
                rest = now.reserved_bytes - now.allocated_bytes
                lines.append(
                    f"  {device}: {_C.format_size(now.allocated_bytes)} in tensors, {_C.format_size(rest)} more held "
                    "in fragments between them"
                )
        lines.append(f"  host: {_C.format_size(self.resident_after_bytes)} resident")
        return lines

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(chr(10).join(self._lines()))}</pre>{self.live._repr_html_()}"


_NOTHING = AllocatorUse(0, 0)


def _sizes(found: dict[str, int]) -> str:
    return ", ".join(f"{_C.format_size(size)} on {device}" for device, size in found.items() if size)


def release(error: BaseException | None = None, *, top: int = 10) -> Released:
    """Drop everything that can no longer be used, and give its memory back.

    `gc.collect(); torch.cuda.empty_cache()` does not free tensors of a failed step that an exception still holds. For
    every exception that something still refers to (Python's last one, IPython's, one in a variable, a future or a log
    record), the frames of functions that have ended are cleared. Their tensors are freed; the exception, its text and
    its traceback lines stay, and a debugger finds no locals. Then cycles are collected, and autocast's cached casts,
    cuBLAS's workspaces, the allocator's free memory (torch's or memopt's), free pinned memory and free heap are given
    back. Results of later steps do not change; the next step takes some of the memory again, and waits for the device
    once.

    Args:
        error: Clears only the frames of this exception, and of those in its chain.
        top: Number of groups of live tensors that are printed.

    Returns:
        A Released: bytes before and after, by device, resident host memory, and .live, the holders of the rest. Print
            it.

    Raises:
        ValueError: top is negative.
    """
    from memopt._runtime.torch_version import require

    require("memopt.release()")
    if top < 0:
        raise ValueError(f"top={top}: the number of groups to print, 0 or more")
    before, resident_before = _bytes(), resident_bytes()
    frames = exceptions.empty_tracebacks(_tracebacks()) if error is None else exceptions.empty_frames(error)
    give_back()
    from memopt._memory.live.live_tensors import live_tensors

    live = live_tensors(top)
    return Released(before, _bytes(), resident_before, resident_bytes(), frames, live)


def give_back() -> None:
    """Collect cycles, empty caches, and give back memory that is free."""
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # of memopt's allocator too, where that is torch's
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)
        if empty_pinned is not None:
            empty_pinned()
        pinned_memory.trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _tracebacks() -> list[types.TracebackType]:
    """Return all tracebacks; those that the interpreter is about to raise belong to the program too."""
    gc.collect()  # what is garbage already needs no search
    return [thing for thing in gc.get_objects() if type(thing) is types.TracebackType]


def _bytes() -> dict[str, AllocatorUse]:
    from memopt._memory.live import heap_snapshot

    taken = heap_snapshot.take(seconds=0)
    live = {"cpu": 0}
    for one in taken.held.values():
        live[one.device] = live.get(one.device, 0) + one.nbytes
    taken.forget()
    found = {device: AllocatorUse(size, 0) for device, size in live.items() if not device.startswith("cuda")}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = AllocatorUse(
                torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
            )
    return found
