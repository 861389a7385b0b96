"""Pinned host memory beside a CUDA device: taken once and used step after step, and the copies in and out of it.

Copies run beside the computation, in an order that streams alone keep: the host waits for nothing. They are memopt._C's
(csrc/transfer/copies.h), a stream each way.

    host = pinned_tensor(device, nbytes)
    ticket = _C.copy_out(tensor, host)           begins once `tensor` is whole
    _C.copy_await(device.index, ticket)          from here on the present stream may overwrite it or be given its memory
    incoming = IncomingBytes(nbytes, device)
    incoming.begin(host, ticket)                 the copy back begins, behind the copy out
    incoming.tensor()                            for the present stream

A PinnedPool is rings (csrc/transfer/ring.h) of exact sizes: the first step takes what it needs, piece by piece, and the
next ones find it there. A slot serves the next copy out at once: that comes after the last copy in by the order of
streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from memopt import _C

ALIGNED = 4096  # bytes: what direct I/O asks for
FOREVER = 1e8  # seconds, of a wait for a copy


SMALLEST, LARGEST = 32 << 20, 1 << 30  # bytes of a piece, unless one tensor needs more


def pinned_tensor(device: torch.device, nbytes: int) -> torch.Tensor:
    """Return exactly so many page-locked bytes (torch.uint8), not rounded like torch's own.

    Allocation is slow and freeing waits for the device, so keep them."""
    return torch.frombuffer(_C.PinnedMemory(index_of(device), nbytes), dtype=torch.uint8)


def index_of(device: torch.device) -> int:
    return int(torch.cuda.current_device()) if device.index is None else device.index


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a dense tensor's memory as torch.uint8; None if it has gaps, or its values are not its memory."""
    dense = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if tensor.is_conj() or tensor.is_neg() or not dense:
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


class CopyIn:
    """A copy that fills new memory of a device. owner: the stream that the memory belongs to."""

    __slots__ = ("owner", "ticket")

    def __init__(self, owner: torch.cuda.Stream, ticket: int) -> None:
        self.owner, self.ticket = owner, ticket

    def join(self, tensor: torch.Tensor) -> bool:
        """Make later work of the current stream wait for the copy. Return whether that stream is the owner."""
        user = torch.cuda.current_stream(tensor.device)
        _C.copy_await(tensor.device.index, self.ticket, user.cuda_stream)
        if user == self.owner:
            return True
        tensor.record_stream(user)
        return False


class IncomingBytes:
    """New memory of a device, and bytes on their way into it from the host."""

    __slots__ = ("_awaited", "_owner", "_tensor", "copy")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._awaited = True  # until there is something to wait for
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._owner = torch.cuda.current_stream(device)
        self.copy: CopyIn | None = None

    def begin(self, host: torch.Tensor, after: int = 0) -> CopyIn:
        """Begin to copy them. host: pinned, torch.uint8, kept as it is until the copy is over. after: the ticket of the
        copy that filled it."""
        ticket = _C.copy_in(host, self._tensor, after, self._owner.cuda_stream)
        self.copy, self._awaited = CopyIn(self._owner, ticket), False
        return self.copy

    def tensor(self) -> torch.Tensor:
        """Return the bytes, for later work of the current stream."""
        assert self.copy is not None
        self._awaited |= self.copy.join(self._tensor)
        return self._tensor

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and self.copy is not None and not sys.is_finalizing():
            _C.copy_await(self._tensor.device.index, self.copy.ticket, self.copy.owner.cuda_stream)


# ---- taken once ------------------------------------------------------------------------------------------------------


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


class PinnedRoom:
    """Bytes of pinned memory, until nothing refers to this.

    after: the copy that the first copy into it must come behind. mark: the last copy from it, 0 for none."""

    __slots__ = ("_ring", "_slot", "after", "mark", "memory")

    def __init__(self, memory: torch.Tensor, ring: _C.Ring, slot: int, after: int) -> None:
        self.memory, self._ring, self._slot, self.after, self.mark = memory, ring, slot, after, 0

    def __del__(self) -> None:
        self._ring.give(self._slot, self.mark)


class PinnedPool:
    """Pinned memory for all that a process keeps off one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: list[tuple[torch.Tensor, _C.Ring]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned, used or not."""
        return sum(memory.numel() for memory, _ in self._pieces)

    @property
    def peak(self) -> int:
        """The most bytes that were used at once, piece by piece."""
        return sum(ring.held()[1] for _, ring in self._pieces)

    def take(self, nbytes: int, limit: int | None = None) -> PinnedRoom | None:
        """Return room; None if that would exceed `limit` bytes in all, or what the host can pin."""
        for memory, ring in self._pieces:
            if room := slot_in(memory, ring, nbytes):
                return room
        held = self.nbytes
        needed = aligned(nbytes)
        size = max(needed, min(max(held // 4, SMALLEST), LARGEST))
        if limit is not None and held + size > limit:
            size = limit - held
        if size < needed or not self.reserve(size):
            return None
        return slot_in(*self._pieces[-1], nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Pin one more piece; return False if the host cannot."""
        try:
            memory = pinned_tensor(self.device, nbytes)
        except MemoryError:
            return False
        self._pieces.append((memory, _C.Ring(nbytes, ALIGNED)))
        return True

    def trim(self) -> int:
        """Free the pieces that are not in use, after waiting for the device. Return their bytes."""
        before = self.nbytes
        self._pieces = [piece for piece in self._pieces if piece[1].held()[0]]
        return before - self.nbytes


class _CountedPool(PinnedPool):
    """A pool that only counts what it would pin."""

    def reserve(self, nbytes: int) -> bool:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self._pieces.append((memory, _C.Ring(nbytes, ALIGNED)))
        return True


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that a pool pins for tensors of these sizes, all of which it has at the same time."""
    pool = _CountedPool(torch.device("meta"))
    rooms = [pool.take(size) for size in sizes]
    del rooms
    return pool.nbytes


def slot_in(memory: torch.Tensor, ring: _C.Ring, nbytes: int) -> PinnedRoom | None:
    """Return room in memory that a ring gives out; None if there is none."""
    found = ring.take(nbytes)
    if found is None:
        return None
    slot, offset, after = found
    return PinnedRoom(memory[offset : offset + nbytes], ring, slot, after)


_memories: dict[int, PinnedPool] = {}


def host_memory(device: torch.device) -> PinnedPool:
    """Return the process's pinned memory for a device."""
    index = index_of(device)
    if index not in _memories:
        _memories[index] = PinnedPool(torch.device("cuda", index))
    return _memories[index]


def trim() -> int:
    """Free all pinned memory that is not in use. Return its bytes."""
    return sum(memory.trim() for memory in _memories.values())
