"""Host memory for parameters and gradients, in exact sizes: page-locked for a CUDA device, or pages of a file.

torch's own page-locked memory comes in powers of two, which for a model may be twice what it needs. The memory goes
when the last tensor in it does. It is shared with processes forked from this one, so that a fork never leaves the
device with the pages of before and this process with copies of them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from typing import Any

import torch

PAGE = mmap.PAGESIZE
ALIGNMENT = 64  # bytes: a cache line, and what torch's own CPU tensors have


class Block:
    """Bytes from which tensors are cut, one after another."""

    def __init__(self, nbytes: int, pages: mmap.mmap) -> None:
        self.nbytes, self.pages, self.used = nbytes, pages, 0
        self.address = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of that one's size, dtype and, where it is dense, strides, in a storage of its own."""
        flat, self.used = cut(self.pages, like, self.used), self.used + room(like)
        return flat

    def advise(self, tensor: torch.Tensor, advice: int) -> None:
        """madvise on the pages that the tensor has to itself."""
        begin = tensor.data_ptr() - self.address
        first = -(-begin // PAGE) * PAGE
        last = (begin + tensor.nbytes) // PAGE * PAGE
        if last > first:
            self.pages.madvise(advice, first, last - first)


def room(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes of a block."""
    return -(-int(tensor.nbytes) // ALIGNMENT) * ALIGNMENT


def cut(buffer: object, like: torch.Tensor, offset: int) -> torch.Tensor:
    # Where strides have gaps or overlap, those of a contiguous tensor are taken.
    strides = torch.empty_like(like, device="meta").stride()
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, strides) if like.dim() != 1 else flat


# ---- page-locked -----------------------------------------------------------------------------------------------------


class _Locked(mmap.mmap):
    """Pages that CUDA has registered, until nothing is in them any more."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[attr-defined]


def locked_block(nbytes: int) -> Block:
    """Raises MemoryError where the host has no such memory, or does not let it be locked."""
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    try:
        pages = _Locked(-1, size)
    except OSError as error:
        raise MemoryError(f"the host has no {size} bytes for the parameters: {error.strerror}") from error
    block = Block(size, pages)
    status = torch.cuda.cudart().cudaHostRegister(block.address, size, 1)  # type: ignore[attr-defined]
    if int(status) != 0:
        raise MemoryError(
            f"the host does not lock {size} bytes of memory for the parameters "
            f"({torch.cuda.cudart().cudaGetErrorString(status)}): "  # type: ignore[attr-defined]
            "raise `ulimit -l`, or the memory limit of the container, or give offload_layers(to=) a directory"
        )
    pages.address = block.address
    return block


class LockedMemory:
    """Page-locked memory that is lent to tensors and comes back when the last one in it has gone: a step's gradients
    take what the last step's had."""

    def __init__(self) -> None:
        self._free: dict[int, list[Block]] = {}
        self.taken = 0  # bytes

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        size = max(-(-like.nbytes // PAGE) * PAGE, PAGE)
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            block = locked_block(size)
            self.taken += size
        loan = _loan_type(size).from_buffer(block.pages)
        weakref.finalize(loan, free.append, block).atexit = False
        return cut(loan, like, 0)


@functools.cache
def _loan_type(size: int) -> Any:
    """Of the buffers that one tensor's storage holds each: a subclass can be referred to weakly."""
    return type("Loan", (ctypes.c_char * size,), {})


# ---- pages of a file -------------------------------------------------------------------------------------------------


def file_block(directory: str, nbytes: int) -> Block:
    """Pages of a file in the directory. It has no name, so that nothing is left however the process ends, and its room
    is taken now, so that no write can find the disk full later. Raises OSError, naming the directory."""
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="memopt-", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return Block(size, mmap.mmap(file.fileno(), size))
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}: offload_layers(to=) needs a directory that can be written to and has room for "
            f"{size} bytes of parameters",
            directory,
        ) from error
