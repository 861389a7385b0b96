"""Host memory for parameters and gradients, in exact sizes: page-locked for a CUDA device, or pages of a file.

torch's own page-locked memory comes in powers of two, which for a model may be twice what it needs. The memory goes
when the last tensor in it does."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from typing import Any

import torch

from memopt import _C
from memopt.offloading.transfers import index_of

PAGE = mmap.PAGESIZE
ALIGNMENT = 64  # bytes: a cache line, and what torch's own CPU tensors have


class Block:
    """Bytes from which tensors are cut, one after another."""

    def __init__(self, nbytes: int, pages: mmap.mmap | _C.PinnedMemory) -> None:
        self.nbytes, self.pages, self.used = nbytes, pages, 0
        self.address = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of that one's size, dtype and, where it is dense, strides, in a storage of its own."""
        flat, self.used = cut(self.pages, like, self.used), self.used + room(like)
        return flat

    def advise(self, tensor: torch.Tensor, advice: int) -> None:
        """madvise on the pages, of a file, that the tensor has to itself."""
        assert isinstance(self.pages, mmap.mmap)
        begin = tensor.data_ptr() - self.address
        first = -(-begin // PAGE) * PAGE
        last = (begin + tensor.nbytes) // PAGE * PAGE
        if last > first:
            self.pages.madvise(advice, first, last - first)

    def advise_all(self, advice: int) -> None:
        assert isinstance(self.pages, mmap.mmap)
        self.pages.madvise(advice)


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


def locked_block(device: torch.device, nbytes: int) -> Block:
    """Raises MemoryError where the host has no such memory, or does not let it be locked."""
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    try:
        return Block(size, _C.PinnedMemory(index_of(device), size))
    except (_C.Error, MemoryError, RuntimeError) as error:
        raise MemoryError(
            f"the host does not lock {size} bytes of memory for the parameters ({error}): raise `ulimit -l`, or the "
            "memory limit of the container, or give offload_layers(to=) a directory"
        ) from error


class LockedMemory:
    """Page-locked memory that is lent to tensors and comes back when the last one in it has gone: a step's gradients
    take what the last step's had."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Block]] = {}
        self.taken = 0  # bytes

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        size = max(-(-like.nbytes // PAGE) * PAGE, PAGE)
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            block = locked_block(self.device, size)
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
