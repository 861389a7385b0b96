"""Division of a device's bytes: live tensors by category, free memory of the allocator, other users, and free memory.

The parts add up to the driver's total exactly. A block of the allocator has the category of the tensor in it. A block
that no Python tensor leads to is "other": a workspace, or a temporary of a running operation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from memopt import _C
from memopt._memory.live.heap_snapshot import HeapSnapshot, take
from memopt._memory.recording import snapshot_file
from memopt._memory.recording.recording import CATEGORIES, OTHER
from memopt._runtime.results import Result
from memopt.cuda._statistics import device_index

FREE, CACHE, CONTEXT, UNKNOWN = "free", "cache", "context", "context and other processes"


@dataclass(frozen=True)
class AllocatorBlocks:
    """Blocks of one device's allocator, as columns in the order of their addresses."""

    address: torch.Tensor
    size: torch.Tensor
    live: torch.Tensor
    segment: torch.Tensor  # the number of the segment that it is in

    @property
    def reserved(self) -> int:
        return int(self.size.sum())

    @property
    def cached(self) -> int:
        return int(self.size[~self.live].sum())

    def containing(self, addresses: torch.Tensor) -> torch.Tensor:
        """Return the number of the block that contains each address, -1 for none."""
        if not len(self.address):
            return torch.full_like(addresses, -1)
        found = torch.searchsorted(self.address, addresses, right=True) - 1
        inside = (found >= 0) & (addresses < (self.address + self.size)[found])
        return torch.where(inside, found, -1)


@dataclass(frozen=True, repr=False)
class DeviceBytes(Result):
    """The division of a device's bytes. Print it, or show it as a bar in a notebook.

    Attributes:
        device: "cuda:0".
        total_bytes: Bytes of the device, as the driver gives them.
        parts: Bytes by name, in the order in which they are shown; they add up to total. Other processes are "process
            3312".
        source: The source of the figures of other processes.
    """

    device: str
    total_bytes: int
    parts: dict[str, int]
    source: str

    def __str__(self) -> str:
        bar = " + ".join(f"{size} {name}" for name, size in self._shown())
        return f"{self.device}: {_C.format_size(self.total_bytes)} = {bar}"

    def _shown(self) -> list[tuple[str, str]]:
        return [(name, _C.format_size(size)) for name, size in self.parts.items() if size]

    def _repr_html_(self) -> str:
        """Return a bar with a colour for each part."""
        shown = [(name, size) for name, size in self.parts.items() if size]
        cells = "".join(
            f'<div title="{name}: {_C.format_size(size)}" style="background:{_COLOURS[i % len(_COLOURS)]};'
            f'width:{100 * size / self.total_bytes:.3f}%"></div>'
            for i, (name, size) in enumerate(shown)
        )
        said = ", ".join(
            f'<span style="color:{_COLOURS[i % len(_COLOURS)]}">&#9632;</span> {name} {_C.format_size(size)}'
            for i, (name, size) in enumerate(shown)
        )
        return (
            f"<div>{self.device}: {_C.format_size(self.total_bytes)}"
            f'<div style="display:flex;height:1.2em;max-width:60em">{cells}</div>{said}</div>'
        )


_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999999", "#bbbbbb", "#dddddd")


def device_bar(device: torch.device | str | int | None = None) -> DeviceBytes:
    """Divide a CUDA device's bytes into parts that add up to the driver's total.

    The parts are live tensors by category, free memory that the allocator holds, the rest of this process (CUDA's
    context, libraries), other processes (by NVML, where nvidia-ml-py is installed), and free memory.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.

    Returns:
        A DeviceBytes: print it; in a notebook it is a bar.

    Raises:
        ValueError: device is not a CUDA device.
        RuntimeError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("memopt.device_bar() needs a CUDA device, and torch sees none here")
    torch.cuda.init()
    index = device_index(device)
    taken = take(seconds=0)
    try:
        return split(index, taken, blocks_of(index))
    finally:
        taken.forget()


def blocks_of(device: int) -> AllocatorBlocks:
    """Return the blocks of torch's or memopt's allocator, without a history."""
    rows = [
        (address, block["size"], block["state"] != "inactive", number)
        for number, segment in enumerate(_segments())
        if segment["device"] == device
        for address, block in snapshot_file.blocks_of(segment)
    ]
    table = torch.tensor(sorted(rows), dtype=torch.int64, device="cpu").reshape(-1, 4)
    return AllocatorBlocks(table[:, 0].contiguous(), table[:, 1], table[:, 2].bool(), table[:, 3])


def _segments() -> list[dict[str, Any]]:
    try:
        asked: Any = (0, 0, False)  # without traces
        return list(torch._C._cuda_memorySnapshot(asked)["segments"])
    except RuntimeError:  # torch <= 2.11 knows no such question
        return list(torch._C._cuda_memorySnapshot(None)["segments"])


def split(device: int, snapshot: HeapSnapshot, blocks: AllocatorBlocks) -> DeviceBytes:
    """Divide one device's bytes, as they are now."""
    name = f"cuda:{device}"
    free, total = torch.cuda.mem_get_info(device)
    parts = dict.fromkeys(CATEGORIES, 0)
    parts.update(zip(CATEGORIES, by_category(name, snapshot, blocks).tolist(), strict=True))
    parts[CACHE] = blocks.cached
    rest = total - free - blocks.reserved
    processes = _processes(device)
    own = (processes or {}).pop(os.getpid(), None)
    others = sum((processes or {}).values())
    if processes is None or others > rest:
        parts[UNKNOWN], source = rest, "the driver"
    else:
        # A container's number of a process is not the driver's, and drivers differ in what they count.
        agreed = own is not None and own - blocks.reserved == rest - others
        parts[CONTEXT if agreed else UNKNOWN] = rest - others
        parts.update(_named(processes))
        source = "NVML and the driver"
    parts[FREE] = free
    return DeviceBytes(name, total, parts, source)


def _named(processes: dict[int, int]) -> dict[str, int]:
    return {f"process {pid}": size for pid, size in sorted(processes.items(), key=lambda item: -item[1])}


def category_of(device: str, snapshot: HeapSnapshot, blocks: AllocatorBlocks) -> torch.Tensor:
    """Return for each block an index into CATEGORIES."""
    held = [one for one in snapshot.held.values() if one.device == device]
    category = torch.full((len(blocks.size),), OTHER, device="cpu")
    where = blocks.containing(torch.tensor([one.address for one in held], dtype=torch.int64, device="cpu"))
    named = torch.tensor([one.category for one in held], dtype=torch.int64, device="cpu")
    category[where[where >= 0]] = named[where >= 0]
    return category


def by_category(device: str, snapshot: HeapSnapshot, blocks: AllocatorBlocks) -> torch.Tensor:
    """Return the bytes of the live blocks by CATEGORIES."""
    category = category_of(device, snapshot, blocks)
    sums = torch.zeros(len(CATEGORIES), dtype=torch.int64, device="cpu")
    return sums.index_add_(0, category[blocks.live], blocks.size[blocks.live])


def _processes(device: int) -> dict[int, int] | None:
    """Return bytes by process from NVML (nvidia-ml-py), where that is installed and reports them."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        index = torch.cuda._get_nvml_device_index(device)
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    except (pynvml.NVMLError, RuntimeError):  # no permission, or a device that NVML does not have
        return None
    sizes = {process.pid: process.usedGpuMemory for process in found}
    return None if None in sizes.values() else sizes
