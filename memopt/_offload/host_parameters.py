"""Offloaded parameters' host memory, and how a model moves in and out of it.

The memory is taken in exact sizes, page-locked for a CUDA device or pages of a file: torch's own page-locked memory
comes in powers of two, which for a model may be twice what it needs. It goes when the last tensor in it does. The
nn.Parameter objects stay what they are: optimizers, hooks and ties hold on to them; it is their data that moves."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memopt import _C
from memopt._offload.model_layers import Layer
from memopt._offload.pinned_memory import index_of

PAGE = mmap.PAGESIZE
ALIGNMENT = 64  # bytes: a cache line, and what torch's own CPU tensors have


class HostBlock:
    """Bytes from which tensors are cut, one after another."""

    def __init__(self, nbytes: int, pages: mmap.mmap | _C.PinnedMemory) -> None:
        self.nbytes, self.pages, self.used = nbytes, pages, 0
        self.address = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the given one's size, dtype and, if it is dense, strides, in a storage of its own."""
        flat, self.used = cut(self.pages, like, self.used), self.used + room(like)
        return flat

    def advise(self, tensor: torch.Tensor, advice: int) -> None:
        """Call madvise on the pages of a file that only this tensor occupies."""
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
    """Return the bytes that a tensor takes of a block."""
    return -(-int(tensor.nbytes) // ALIGNMENT) * ALIGNMENT


def cut(buffer: object, like: torch.Tensor, offset: int) -> torch.Tensor:
    # Where strides have gaps or overlap, those of a contiguous tensor are taken.
    strides = torch.empty_like(like, device="meta").stride()
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, strides) if like.dim() != 1 else flat


# ---- page-locked -----------------------------------------------------------------------------------------------------


def locked_block(device: torch.device, nbytes: int) -> HostBlock:
    """Raises MemoryError where the host has no such memory, or does not let it be locked."""
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    try:
        return HostBlock(size, _C.PinnedMemory(index_of(device), size))
    except (_C.Error, MemoryError, RuntimeError) as error:
        raise MemoryError(
            f"the host cannot lock {size} bytes of memory for the parameters ({error}): raise `ulimit -l` or the "
            "memory limit of the container, or give offload_layers(to=) a directory"
        ) from error


class LockedMemory:
    """Page-locked memory that is lent to tensors and comes back when the last one in it has gone: a step's gradients
    take what the last step's had."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[HostBlock]] = {}
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
    """Return the type of buffers that each hold one tensor's storage: a subclass can be referred to weakly."""
    return type("Loan", (ctypes.c_char * size,), {})


# ---- pages of a file -------------------------------------------------------------------------------------------------


def file_block(directory: str, nbytes: int, what: str = "offload_layers(to=)") -> HostBlock:
    """Pages of a file in the directory. It has no name, so that nothing is left however the process ends, and its room
    is taken now, so that no write can find the disk full later. Raises OSError, naming what it is for and the
    directory."""
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="memopt-", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return HostBlock(size, mmap.mmap(file.fileno(), size))
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}: {what} needs a directory that can be written to and has room for {size} bytes",
            directory,
        ) from error


# ---- moving in and out -----------------------------------------------------------------------------------------------

MakeBlock = Callable[[int], HostBlock]


class HostParameters:
    """The parameters of some layers, each once, and the buffers of the model.

    make_block: takes the memory for one layer. Raises what that raises, before anything has changed."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], make_block: MakeBlock) -> None:
        self.blocks: dict[int, HostBlock] = {}  # by the address of the values
        self._moves: list[tuple[nn.Parameter, torch.Tensor, torch.device]] = []
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        self.model, self.nbytes = model, 0
        seen: set[int] = set()
        for layer in layers:
            parameters = [p for p in layer.parameters() if id(p) not in seen]
            seen.update(map(id, parameters))
            if not parameters:
                continue
            block = make_block(sum(map(room, parameters)))
            for p in parameters:
                host = block.take(p.detach())
                host.copy_(p.detach())
                self._moves.append((p, host, p.device))
                self.blocks[host.data_ptr()] = block
                self.nbytes += p.nbytes

    def move_in(self, device: torch.device) -> None:
        """Move the parameters' data to the host, and buffers to the compute device.

        All memory is allocated before anything changes."""
        grads = [None if p.grad is None else p.grad.to("cpu") for p, *_ in self._moves]
        buffers = _buffers_on(self.model, device)
        for (p, host, _), grad in zip(self._moves, grads, strict=True):
            set_data(p, host, grad)
        for module, name, value in buffers:
            before = module._buffers[name]
            assert before is not None
            self._buffers.append((module, name, before.device))
            module._buffers[name] = value

    def move_out(self) -> None:
        """Undo move_in(): move the current values to their former devices.

        All memory is allocated before anything changes."""
        found = []
        for p, _, device in self._moves:
            grad = None if p.grad is None else p.grad.to(device, copy=device.type == "cpu")
            # Ordinary memory, also where it was on the host before; what was assigned since stays where it is.
            offloaded = p.data_ptr() in self.blocks
            data = p.detach().to(device, copy=True) if offloaded else p.detach()
            found.append((p, data, grad))
        buffers = [
            (module, name, value.to(device))
            for module, name, device in self._buffers
            if (value := module._buffers.get(name)) is not None
        ]
        for p, data, grad in found:
            set_data(p, data, grad)
        tied: dict[int, torch.Tensor] = {}
        for module, name, value in buffers:
            module._buffers[name] = tied.setdefault(id(module._buffers[name]), value)
        self._moves.clear()
        self._buffers.clear()
        self.blocks.clear()


def set_data(p: nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Replace a Parameter's data and its gradient's, and keep both objects."""
    kept = p.grad
    p.grad = None
    p.data = data
    if kept is not None:
        assert grad is not None
        with torch.no_grad():
            kept.data = grad
        p.grad = kept


def _buffers_on(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return (module, name, value on the device) of the buffers that are not there; one value for modules that share
    it."""
    tied: dict[int, torch.Tensor] = {}
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                value = tied.setdefault(id(buffer), buffer.to(device))
                found.append((module, name, value))
    return found
