"""A file of tensors in memory by mapping, copy-on-write: what is read comes from the page cache and counts as that;
what is written stays in this process and never reaches the file.

The mapping reserves nothing (MAP_NORESERVE), so that a file may be larger than the machine's memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memopt.data._mmap import safetensors_layout

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number for it, on every processor torch runs on


@dataclass(frozen=True)
class File:
    """A file, and what tells it from another, or from what it becomes, under the same name."""

    path: str
    size: int
    """In bytes."""
    inode: int
    mtime_ns: int

    @classmethod
    def at(cls, path: str, there: os.stat_result | None = None) -> File:
        there = there or os.stat(path)
        return cls(path, there.st_size, there.st_ino, there.st_mtime_ns)


@dataclass(frozen=True)
class Part:
    """Some rows of a field where they lie in a file: what a worker needs to map them again."""

    file: File
    dtype: str
    """torch's name, as "bfloat16"."""
    shape: tuple[int, ...]
    begin: int


def map_file(file: File) -> mmap.mmap:
    """Map the whole of a file. Raises ValueError if it is not the file that it was."""
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = File.at(file.path, os.fstat(descriptor))
        if there != file:
            sizes = (
                f"has {there.size} bytes where {file.size} were" if there.size != file.size else "has changed"
            )
            raise safetensors_layout.Malformed(
                f"{file.path} {sizes}: it was truncated or rewritten since it was opened; open it again"
            )
        return mmap.mmap(
            descriptor, file.size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)


def view(part: Part, mapping: mmap.mmap | None) -> Any:
    """Return the tensor of a part, on the mapping of its file."""
    import torch

    dtype = getattr(torch, part.dtype)
    count = math.prod(part.shape)
    if count == 0 or mapping is None:
        return torch.empty(part.shape, dtype=dtype)
    if part.begin % dtype.itemsize:  # torch would read between its own elements
        raw = torch.frombuffer(mapping, dtype=torch.uint8, count=count * dtype.itemsize, offset=part.begin)
        warnings.warn(
            f"memopt.data.MmapDataset: {part.file.path} has {part.dtype} at byte {part.begin}, which is not a "
            f"multiple of {dtype.itemsize}: that tensor was copied into memory; write the file again to map it",
            RuntimeWarning,
            stacklevel=2,
        )
        return raw.clone().view(dtype).reshape(part.shape)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=part.begin).reshape(part.shape)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in errors of its reader: Malformed, or TypeError for number types that torch does not have.

    Readers raise all kinds of errors for a damaged or forged file."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if (isinstance(error, OSError) and error.errno is not None) or path in str(error):
            raise
        text = (
            f"{path}: {error}"
            if isinstance(error, ValueError | TypeError)
            else f"{path}: {_DAMAGED}: {error!r}"
        )
        raise (TypeError if isinstance(error, TypeError) else safetensors_layout.Malformed)(text) from None


_DAMAGED = "it is damaged, or not of the format that its name states"


def safetensors_parts(path: str) -> tuple[dict[str, Part], dict[str, str]]:
    """Return (fields, metadata) of a safetensors file. Raises Malformed unless it is complete."""
    with open(path, "rb") as file:
        there = File.at(path, os.fstat(file.fileno()))
        length = safetensors_layout.header_length(file.read(8), there.size)
        file.seek(0)
        extents, metadata = safetensors_layout.parse(file.read(length), there.size)
    parts = {
        name: Part(there, safetensors_layout.TORCH[one.dtype], one.shape, one.begin)
        for name, one in extents.items()
    }
    return parts, metadata


def npy_part(path: str) -> Part:
    """Return the array of a .npy file."""
    import numpy

    try:
        if _item_bytes(path) == 0:
            raise ValueError(f"{_DAMAGED}: its elements have no bytes")  # NumPy would divide by their number
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # its header is read as a Python expression, with what errors those have
        raise ValueError(f"{_DAMAGED}: {error!r}") from None
    if not isinstance(array, numpy.memmap):
        raise ValueError(f"{_DAMAGED}: it holds a {type(array).__name__}")
    return memmap_part(array)


def _item_bytes(path: str) -> int | None:
    """Return the bytes of an element, by the header; None if the file has none."""
    from numpy.lib import format as npy

    with open(path, "rb") as file:
        if file.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            return None
        file.seek(0)
        first = npy.read_magic(file) == (1, 0)
        _, _, dtype = npy.read_array_header_1_0(file) if first else npy.read_array_header_2_0(file)
        return int(dtype.itemsize)


def memmap_part(array: Any) -> Part:
    """Return the part of a file that a numpy.memmap is."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"memopt.data.MmapDataset: the memmap of {array.filename} is not contiguous in rows (strides "
            f"{array.strides}): give the whole array, or write it in C order"
        )
    base = array
    while getattr(base.base, "filename", None) is not None and not isinstance(base.base, mmap.mmap):
        base = base.base
    begin = base.offset + (array.ctypes.data - base.ctypes.data)
    path = os.path.abspath(os.fspath(array.filename))
    return Part(File.at(path), torch_name(array.dtype), tuple(array.shape), int(begin))


def torch_name(dtype: Any) -> str:
    """Return torch's name of a NumPy dtype. Raises TypeError if torch lacks it."""
    import torch

    if not dtype.isnative or not isinstance(getattr(torch, dtype.name, None), torch.dtype):
        raise TypeError(f"memopt.data.MmapDataset: torch has no dtype for NumPy's {dtype.str!r} ({dtype})")
    return str(dtype.name)


def mapped_bytes(mappings: Iterable[mmap.mmap]) -> tuple[int, int]:
    """(page cache, own) bytes that this process has in memory of the files of these mappings, in all mappings of them.
    Own are the pages that it wrote to (Anonymous); the rest is the files'.

    Files are known by device and inode: the name says " (deleted)" once another file was renamed into its place."""
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in mappings]
    with open("/proc/self/smaps") as file:
        lines = [line.split(None, 5) for line in file]
    # A mapping's first line: addresses, rights, offset, device, inode, path. What stat() says of the device need not be
    # what is here (btrfs, overlayfs).
    heads = [line for line in lines if not line[0].endswith(":")]
    files = {_file(line) for line in heads if _holds_any(line[0], addresses)}
    resident = own = 0
    counted = False
    for line in lines:
        if not line[0].endswith(":"):
            counted = _file(line) in files
        elif counted and line[0] == "Rss:":
            resident += int(line[1]) << 10
        elif counted and line[0] == "Anonymous:":
            own += int(line[1]) << 10
    return resident - own, own


def _file(head: list[str]) -> tuple[str, str]:
    return head[3], head[4]


def _holds_any(extent: str, addresses: list[int]) -> bool:
    begin, end = (int(number, 16) for number in extent.split("-"))
    return any(begin <= address < end for address in addresses)
