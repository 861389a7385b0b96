"""Pinned host memory in which batches wait for their copy to a CUDA device, and what else must be left as it is until a
copy is over.

It is a ring (csrc/transfer/ring.h) of exactly as many bytes as `depth` batches take, pinned when the first one comes. A
slot is given back once its copy is over, so the host waits where it is `depth` copies ahead of the device: that is the
bound. Batches that grow have a larger ring, by an eighth more than is asked for, and the old one goes when nothing lies
in it any more.

A batch that comes pinned takes no slot, and the host waits for none: it is kept until its copy is over, and let go when
the next batch is sent. So there are as many of them as the host is ahead of the device.

All prefetchers of a device have one, which goes with the last of them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque

import torch

from memopt import _C
from memopt._offload.pinned_memory import pinned_tensor
from memopt._offload.pinned_pool import ALIGNED
from memopt._runtime.log import logger

_PATIENCE = 0.1  # seconds of a wait in C: then Python's signal handlers have their turn


class RingSlot:
    """Bytes of a ring's memory, until nothing refers to this; room: (memory, begin, end)."""

    __slots__ = ("_number", "_ring", "room")

    def __init__(self, ring: _C.Ring, number: int, room: tuple[torch.Tensor, int, int]) -> None:
        self._ring, self._number, self.room = ring, number, room

    def __del__(self) -> None:
        self._ring.give(self._number, 0)


class BatchMemory:
    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.device, self._index = device, int(device.index)
        self.lock = threading.RLock()  # held from take() until what is read is held
        self._pieces: list[tuple[torch.Tensor, _C.Ring]] = []  # the last one is in use
        self._flying: deque[tuple[int, object]] = deque()  # tickets, and what they read
        self._refused = False

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned, used or not."""
        return sum(ring.held()[2] for _, ring in self._pieces)

    def take(self, nbytes: int, depth: int) -> RingSlot | None:
        """Room for a batch, of which there will be `depth` at once. Waits for older copies. None where the batch needs
        none (nbytes is 0: all of it is pinned already), or the host can pin nothing. In any case what belongs to
        copies that are over is let go."""
        slot = -(-nbytes // ALIGNED) * ALIGNED
        with self.lock:
            self.settle()
            if not nbytes:
                return None
            if not self._pieces or self._pieces[-1][0].numel() < (slot if self._refused else depth * slot):
                self._grow(slot, depth)
            while self._pieces and self._pieces[-1][0].numel() >= slot:
                memory, ring = self._pieces[-1]
                if found := ring.take(nbytes):
                    number, begin, _ = found
                    return RingSlot(ring, number, (memory, begin, begin + nbytes))
                self._wait_for_oldest()
            return None

    def hold(self, ticket: int, what: object) -> None:
        """Until the copy is over."""
        with self.lock:
            self._flying.append((ticket, what))

    def settle(self) -> None:
        """Release the memory of copies that are over."""
        with self.lock:
            while self._flying and _C.copy_over(self._index, self._flying[0][0]):
                self._flying.popleft()
            if len(self._pieces) > 1:
                *old, last = self._pieces
                self._pieces = [*(piece for piece in old if piece[1].held()[0]), last]

    def _wait_for_oldest(self) -> None:
        assert self._flying, "room is taken that no copy reads"
        self._wait(self._flying[0][0])
        self.settle()

    def _wait(self, ticket: int) -> None:
        while not _C.copy_wait(self._index, ticket, _PATIENCE):
            pass

    def _grow(self, slot: int, depth: int) -> None:
        """A ring for `depth` slots; for fewer where the host cannot."""
        whole = depth * slot
        if self._pieces:
            whole += -(-whole // 8 // ALIGNED) * ALIGNED
        for size in (whole, depth * slot, slot):
            if self._pieces and size <= self._pieces[-1][0].numel():
                return
            try:
                memory = pinned_tensor(self.device, size)
            except MemoryError:
                continue
            self._pieces.append((memory, _C.Ring(size, ALIGNED)))
            break
        if self.nbytes < depth * slot and not self._refused:
            self._refused = True
            logger.warning(
                "Prefetcher: the host cannot pin %d bytes for %d batches (%d are pinned): their copies do not overlap "
                "the step, or not all. Free host memory, raise the limit of locked memory, or take a smaller depth",
                depth * slot,
                depth,
                self.nbytes,
            )

    def __del__(self) -> None:
        # Tensors that torch has pinned must not be another's while they are read. (Giving back ours waits by itself.)
        if not sys.is_finalizing() and getattr(self, "_flying", None):
            self._wait(self._flying[-1][0])


_memories: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()


def batch_memory(device: torch.device) -> BatchMemory:
    """Of all prefetchers to that device, whose index is given."""
    assert device.index is not None
    found = _memories.get(device.index)
    if found is None:
        found = _memories[device.index] = BatchMemory(device)
    return found
