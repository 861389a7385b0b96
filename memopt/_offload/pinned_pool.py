"""Pinned host memory that is taken once and used step after step, for all that a process keeps off one device.

It is rings (csrc/transfer/ring.h) of exact sizes: the first step takes what it needs, piece by piece, and the next ones
find it there. A slot serves the next copy out at once: that comes after the last copy in by the order of streams."""

from __future__ import annotations

import torch

from memopt import _C
from memopt._offload.pinned_memory import index_of, pinned_tensor

ALIGNED = 4096  # bytes: what direct I/O asks for
SMALLEST, LARGEST = 32 << 20, 1 << 30  # bytes of a piece, unless one tensor needs more


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
        """None where that would be more than `limit` bytes in all, or more than the host can pin."""
        for memory, ring in self._pieces:
            if room := _slot(memory, ring, nbytes):
                return room
        held = self.nbytes
        needed = aligned(nbytes)
        size = max(needed, min(max(held // 4, SMALLEST), LARGEST))
        if limit is not None and held + size > limit:
            size = limit - held
        if size < needed or not self.reserve(size):
            return None
        return _slot(*self._pieces[-1], nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Pins one more piece; False where the host cannot."""
        try:
            memory = pinned_tensor(self.device, nbytes)
        except MemoryError:
            return False
        self._pieces.append((memory, _C.Ring(nbytes, ALIGNED)))
        return True

    def trim(self) -> int:
        """Gives back the pieces in which nothing lies; waits for the device. Returns their bytes."""
        before = self.nbytes
        self._pieces = [piece for piece in self._pieces if piece[1].held()[0]]
        return before - self.nbytes


def _slot(memory: torch.Tensor, ring: _C.Ring, nbytes: int) -> PinnedRoom | None:
    found = ring.take(nbytes)
    if found is None:
        return None
    slot, offset, after = found
    return PinnedRoom(memory[offset : offset + nbytes], ring, slot, after)


_memories: dict[int, PinnedPool] = {}


def host_memory(device: torch.device) -> PinnedPool:
    """The process's own beside a device."""
    index = index_of(device)
    if index not in _memories:
        _memories[index] = PinnedPool(torch.device("cuda", index))
    return _memories[index]


def trim() -> int:
    """Gives back all pinned memory in which nothing lies; bytes."""
    return sum(memory.trim() for memory in _memories.values())
