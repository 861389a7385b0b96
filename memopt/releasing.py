"""memopt.release(): memory that nothing needs any more goes back, and what still holds the rest is said."""

from __future__ import annotations

import ctypes
import gc
import html
import os
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memopt import _C
from memopt.offloading import host_memory
from memopt.owners import dead_frames

if TYPE_CHECKING:
    from memopt.owners.live import LiveTensors


@dataclass(frozen=True)
class Bytes:
    """Of one device: in live tensors, and held by torch's allocator (on the CPU 0: it has no cache)."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Released:
    """`before`, `after`: by device. `resident_before`, `resident_after`: bytes of host memory that the process has.
    `frames`: of functions that had ended, and were emptied. `live`: who holds what is left. Print it, or show it in a
    notebook."""

    before: dict[str, Bytes]
    after: dict[str, Bytes]
    resident_before: int
    resident_after: int
    frames: int
    live: LiveTensors = field(repr=False)

    @property
    def freed(self) -> dict[str, int]:
        """Bytes of tensors that are gone, by device."""
        return {
            device: max(0, there.allocated - self.after.get(device, _NOTHING).allocated)
            for device, there in self.before.items()
        }

    @property
    def returned(self) -> dict[str, int]:
        """Bytes that devices, and the host ("host"), have got back."""
        devices = {
            device: max(0, there.reserved - self.after.get(device, _NOTHING).reserved)
            for device, there in self.before.items()
            if there.reserved
        }
        return {**devices, "host": max(0, self.resident_before - self.resident_after)}

    def __str__(self) -> str:
        return "\n".join([*self._lines(), str(self.live)])

    __repr__ = __str__

    def _lines(self) -> list[str]:
        lines = [
            f"released: {_sizes(self.freed) or 'no tensor'}; given back: {_sizes(self.returned) or 'nothing'}"
        ]
        if self.frames:
            lines[0] += f" ({self.frames} frames of functions that had ended were emptied)"
        for device, now in self.after.items():
            if now.reserved:
                rest = now.reserved - now.allocated
                lines.append(
                    f"  {device}: {_C.format_size(now.allocated)} in tensors, {_C.format_size(rest)} more held, in "
                    "pieces between them"
                )
        lines.append(f"  host: {_C.format_size(self.resident_after)} resident")
        return lines

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(chr(10).join(self._lines()))}</pre>{self.live._repr_html_()}"


_NOTHING = Bytes(0, 0)


def _sizes(found: dict[str, int]) -> str:
    return ", ".join(f"{_C.format_size(size)} on {device}" for device, size in found.items() if size)


def release(error: BaseException | None = None, *, top: int = 10) -> Released:
    """Drops what nobody can use any more, and gives its memory back: what `gc.collect(); torch.cuda.empty_cache()` is
    meant to do, and does not where an exception still holds the tensors of the step that failed.

    Of every exception that something still refers to (Python's last one, IPython's, one in a variable, a future or a
    log record) the frames of functions that have ended are emptied: their tensors go, the exception, its text and its
    lines stay, and a debugger finds no locals. `error`: only that one, and those that it followed. Then cycles are
    collected, and casts that autocast keeps, cuBLAS's workspaces, the allocator's free memory (torch's or memopt's),
    free pinned memory and free heap go back. Results do not change; the next step takes some of it again, and waits
    for the device once.

    Returns a Released: bytes of tensors and of the allocator before and after, by device, resident host memory, and
    .live, who holds the rest (`top` groups of it are printed); print it."""
    from memopt.torch_version import require

    require("memopt.release()")
    if top < 0:
        raise ValueError(f"top={top}: the number of groups to print, 0 or more")
    before, resident_before = _bytes(), _resident()
    frames = dead_frames.empty_tracebacks(_tracebacks()) if error is None else dead_frames.empty(error)
    give_back()
    from memopt.owners.live import live_tensors

    live = live_tensors(top)
    return Released(before, _bytes(), resident_before, _resident(), frames, live)


def give_back() -> None:
    """Cycles, caches, and memory that is free already."""
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # of memopt's allocator too, where that is torch's
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)
        if empty_pinned is not None:
            empty_pinned()
        host_memory.trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _tracebacks() -> list[types.TracebackType]:
    """All that there are; those that the interpreter is about to raise are the program's too."""
    gc.collect()  # what is garbage already needs no search
    return [thing for thing in gc.get_objects() if type(thing) is types.TracebackType]


def _bytes() -> dict[str, Bytes]:
    from memopt.owners import census

    taken = census.take(seconds=0)
    live = {"cpu": 0}
    for one in taken.held.values():
        live[one.device] = live.get(one.device, 0) + one.nbytes
    taken.forget()
    found = {device: Bytes(size, 0) for device, size in live.items() if not device.startswith("cuda")}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = Bytes(
                torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
            )
    return found


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
