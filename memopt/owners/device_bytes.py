"""Where a device's bytes are: what live tensors take by category, what the allocator holds free, what this process has
besides, other processes, and what is free. The parts add up to the driver's number of bytes, to the byte.

A block of the allocator is of the category of the tensor in it; one that no tensor of Python's leads to is "other": a
workspace, or a temporary of an operation that runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from memopt import _C
from memopt.cuda.device_index import device_index
from memopt.owners.census import Census, take
from memopt.profiling.recording import CATEGORIES, OTHER

FREE, CACHE, CONTEXT, UNKNOWN = "free", "cache", "context", "context and other processes"


@dataclass(frozen=True)
class Blocks:
    """The allocator's of one device, as columns in the order of their addresses."""

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
        """Of each address the number of its block, -1 where it is in none."""
        if not len(self.address):
            return torch.full_like(addresses, -1)
        found = torch.searchsorted(self.address, addresses, right=True) - 1
        inside = (found >= 0) & (addresses < (self.address + self.size)[found])
        return torch.where(inside, found, -1)


@dataclass(frozen=True)
class DeviceBytes:
    """`parts`: by name, in the order in which they are shown; they add up to `total`. Those of other processes are
    "process 3312". `source`: where the last ones come from."""

    device: str
    total: int
    parts: dict[str, int]
    source: str

    def __str__(self) -> str:
        bar = " + ".join(f"{size} {name}" for name, size in self._shown())
        return f"{self.device}: {_C.format_size(self.total)} = {bar}"

    __repr__ = __str__

    def _shown(self) -> list[tuple[str, str]]:
        return [(name, _C.format_size(size)) for name, size in self.parts.items() if size]

    def _repr_html_(self) -> str:
        """A bar of as many colours as there are parts."""
        shown = [(name, size) for name, size in self.parts.items() if size]
        cells = "".join(
            f'<div title="{name}: {_C.format_size(size)}" style="background:{_COLOURS[i % len(_COLOURS)]};'
            f'width:{100 * size / self.total:.3f}%"></div>'
            for i, (name, size) in enumerate(shown)
        )
        said = ", ".join(
            f'<span style="color:{_COLOURS[i % len(_COLOURS)]}">&#9632;</span> {name} {_C.format_size(size)}'
            for i, (name, size) in enumerate(shown)
        )
        return (
            f"<div>{self.device}: {_C.format_size(self.total)}"
            f'<div style="display:flex;height:1.2em;max-width:60em">{cells}</div>{said}</div>'
        )


_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999999", "#bbbbbb", "#dddddd")


def device_bar(device: torch.device | str | int | None = None) -> DeviceBytes:
    """Where a CUDA device's bytes are: what live tensors take, by category; what the allocator holds free; what this
    process has besides (CUDA's context, libraries); other processes, by NVML where nvidia-ml-py is installed; what is
    free. They add up to the number of bytes that the driver gives. device: as torch.cuda takes it, the current one by
    default.

    Print it; in a notebook it is a bar. Raises ValueError for what is no CUDA device, RuntimeError where there is
    none."""
    if not torch.cuda.is_available():
        raise RuntimeError("memopt.device_bar() needs a CUDA device, and torch sees none here")
    torch.cuda.init()
    index = device_index(device)
    taken = take(seconds=0)
    try:
        return split(index, taken, blocks_of(index))
    finally:
        taken.forget()


def blocks_of(device: int) -> Blocks:
    """From torch's allocator or memopt's; no history is read."""
    rows = [
        (block.get("address", 0), block["size"], block["state"] != "inactive", number)
        for number, segment in enumerate(_segments())
        if segment["device"] == device
        for block in _addressed(segment)
    ]
    table = torch.tensor(sorted(rows), dtype=torch.int64, device="cpu").reshape(-1, 4)
    return Blocks(table[:, 0].contiguous(), table[:, 1], table[:, 2].bool(), table[:, 3])


def _segments() -> list[dict[str, Any]]:
    try:
        asked: Any = (0, 0, False)  # without traces
        return list(torch._C._cuda_memorySnapshot(asked)["segments"])
    except RuntimeError:  # torch <= 2.11 knows no such question
        return list(torch._C._cuda_memorySnapshot(None)["segments"])


def _addressed(segment: dict[str, Any]) -> list[dict[str, Any]]:
    address = segment["address"]
    for block in segment["blocks"]:
        block.setdefault("address", address)
        address = block["address"] + block["size"]
    return list(segment["blocks"])


def split(device: int, census: Census, blocks: Blocks) -> DeviceBytes:
    """One device's bytes, now."""
    name = f"cuda:{device}"
    free, total = torch.cuda.mem_get_info(device)
    parts = dict.fromkeys(CATEGORIES, 0)
    parts.update(zip(CATEGORIES, by_category(name, census, blocks).tolist(), strict=True))
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


def category_of(device: str, census: Census, blocks: Blocks) -> torch.Tensor:
    """Of each block, an index into CATEGORIES."""
    held = [one for one in census.held.values() if one.device == device]
    category = torch.full((len(blocks.size),), OTHER, device="cpu")
    where = blocks.containing(torch.tensor([one.address for one in held], dtype=torch.int64, device="cpu"))
    named = torch.tensor([one.category for one in held], dtype=torch.int64, device="cpu")
    category[where[where >= 0]] = named[where >= 0]
    return category


def by_category(device: str, census: Census, blocks: Blocks) -> torch.Tensor:
    """Bytes of the live blocks, by CATEGORIES."""
    category = category_of(device, census, blocks)
    sums = torch.zeros(len(CATEGORIES), dtype=torch.int64, device="cpu")
    return sums.index_add_(0, category[blocks.live], blocks.size[blocks.live])


def _processes(device: int) -> dict[int, int] | None:
    """Bytes by process, by NVML's maintained binding (nvidia-ml-py), where that is installed and says."""
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
