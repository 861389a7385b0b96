"""One storage's way off the device and back, beside the computation.

    Departure(flat, …)   the copy out begins
    settle()             what the present stream is given from here on may have the memory: the caller lets it go
    fetch()              the way back begins, before anybody wants it: MemoryError where there is no room for that
    go_on()              the next part of it does, if what it waits for is over
    back()               the bytes again, for the present stream
    join(storage)        the same bytes, which somebody else has already, for the present stream too
    landed()             nobody needs them for now: the next fetch() brings them anew

flat: the whole storage, as torch.uint8."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from typing import Protocol

import torch

from memopt import _C
from memopt.offloading.disk_space import DiskRoom
from memopt.offloading.host_memory import HostMemory, Room, aligned
from memopt.offloading.transfers import Arrival, Landing


class Departure(Protocol):
    def settle(self) -> None: ...
    def fetch(self) -> None: ...
    def go_on(self) -> None: ...
    def back(self) -> torch.Tensor: ...
    def join(self, storage: torch.UntypedStorage) -> None: ...
    def landed(self) -> None: ...


def _join(landing: Landing | None, storage: torch.UntypedStorage) -> None:
    if landing is not None:  # else it has never left
        landing.join(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


class ToPinned:
    """From a CUDA device to pinned memory. stream: the one that the tensor was made on."""

    __slots__ = ("_arrival", "_device", "_landing", "_out", "_room", "_stream")

    def __init__(self, flat: torch.Tensor, room: Room, stream: int) -> None:
        self._room, self._device, self._stream = room, flat.device, stream
        self._arrival: Arrival | None = None
        self._landing: Landing | None = None
        self._out = _C.copy_out(flat, room.memory, room.after, stream)

    def settle(self) -> None:
        _C.copy_await(self._device.index, self._out, self._stream)
        _C.copy_await(self._device.index, self._out)

    def fetch(self) -> None:
        if self._arrival is None:
            self._arrival = Arrival(self._room.memory, self._device, self._out)
            self._landing = self._arrival.landing
            self._room.mark = self._landing.ticket

    def go_on(self) -> None:
        """There are no parts: one stream carries it all."""

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._arrival is not None
        return self._arrival.tensor()

    def join(self, storage: torch.UntypedStorage) -> None:
        _join(self._landing, storage)

    def landed(self) -> None:
        self._arrival = None


class ToDisk:
    """From the CPU to a disk."""

    __slots__ = ("_flat", "_nbytes", "_read", "_room", "_written")

    def __init__(self, flat: torch.Tensor, room: DiskRoom) -> None:
        self._room, self._nbytes = room, flat.numel()
        self._written = room.disk.write(flat, room.offset)
        self._read: _C.DiskJob | None = None
        self._flat: torch.Tensor | None = None

    def settle(self) -> None:
        self._written.finish()

    def fetch(self) -> None:
        if self._read is None:
            flat = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
            self._read, self._flat = self._room.disk.read(flat, self._written), flat

    def go_on(self) -> None:
        """There are no parts: the disk's thread does it all."""

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._read is not None
        assert self._flat is not None
        self._read.finish()
        return self._flat

    def join(self, storage: torch.UntypedStorage) -> None:
        """There are no streams: back() has waited."""

    def landed(self) -> None:
        self._read = self._flat = None


class ToDiskByHost:
    """From a CUDA device through pinned memory to a disk. The device's memory waits for the copy alone; the host waits
    for the disk where it has to be read, and where more than a few storages (`Backlog`) wait to be written.

    limit: bytes of pinned memory in all, which only what is wanted at once may exceed; None for none."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_device",
        "_landing",
        "_limit",
        "_memory",
        "_nbytes",
        "_out",
        "_read",
        "_room",
        "_staging",
        "_stream",
        "_written",
    )

    def __init__(
        self,
        flat: torch.Tensor,
        room: DiskRoom,
        memory: HostMemory,
        staging: Room,
        stream: int,
        limit: int | None = None,
    ) -> None:
        self._room, self._memory, self._device, self._stream = room, memory, flat.device, stream
        self._nbytes, self._limit = flat.numel(), limit
        self._staging: Room | None = None
        self._read: _C.DiskJob | None = None
        self._arrival: Arrival | None = None
        self._landing: Landing | None = None
        self._written: _C.DiskJob | None = None
        self._out = _C.copy_out(flat, staging.memory, staging.after, stream)
        self._staging = staging
        self._written = room.disk.write(staging.memory, room.offset, self._device.index, self._out)

    def settle(self) -> None:
        _C.copy_await(self._device.index, self._out, self._stream)
        _C.copy_await(self._device.index, self._out)

    @property
    def is_written(self) -> bool:
        assert self._written is not None
        return self._written.over()

    def written(self) -> None:
        """Waits until it is; the pinned memory goes."""
        assert self._written is not None
        self._written.finish()
        self._staging = None

    def fetch(self) -> None:
        self._begin(self._limit)

    def _begin(self, limit: int | None) -> None:
        if self._read is not None or self._arrival is not None:
            return
        assert self._written is not None
        if self._staging is not None:
            self.written()
        staging = self._memory.take(self._nbytes, limit)
        if staging is None:
            raise MemoryError(f"{self._nbytes} bytes of pinned memory, to read what was offloaded to a disk")
        # What was copied in from this memory last may still be on its way.
        self._read = self._room.disk.read(staging.memory, self._written, self._device.index, staging.after)
        self._staging = staging

    def go_on(self) -> None:
        if self._read is not None and self._read.over():
            self._arrive()

    def _arrive(self) -> None:
        assert self._read is not None
        assert self._staging is not None
        self._read.finish()
        self._arrival = Arrival(self._staging.memory, self._device)
        self._landing = self._arrival.landing
        self._staging.mark = self._landing.ticket
        self._read = self._staging = None

    def back(self) -> torch.Tensor:
        least = self._memory.nbytes + aligned(self._nbytes)
        self._begin(None if self._limit is None else max(self._limit, least))
        if self._arrival is None:
            self._arrive()
        assert self._arrival is not None
        return self._arrival.tensor()

    def join(self, storage: torch.UntypedStorage) -> None:
        _join(self._landing, storage)

    def landed(self) -> None:
        self._arrival = None

    def __del__(self) -> None:
        # Nobody wants it any more. The pinned memory must not be another's while it is written to the disk, or the copy
        # out still fills it: for that no disk waits that has failed before, or has refused the job.
        if getattr(self, "_staging", None) is not None and self._read is None and not sys.is_finalizing():
            with contextlib.suppress(OSError, _C.Error):  # what failed is of no concern either
                if self._written is not None:
                    self._written.finish()
            with contextlib.suppress(_C.Error):
                _C.copy_wait(self._device.index, self._out, 1e8)


class Backlog:
    """What is still to be written: of more than `limit` bytes, the oldest is waited for."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[weakref.ref[ToDiskByHost], int]] = deque()
        self._nbytes = 0

    def add(self, departure: ToDiskByHost, nbytes: int) -> None:
        self._waiting.append((weakref.ref(departure), nbytes))
        self._nbytes += nbytes

    def make_room(self, limit: int) -> None:
        while self._waiting:
            oldest = self._waiting[0][0]()
            if oldest is not None and self._nbytes <= limit and not oldest.is_written:
                return
            self._nbytes -= self._waiting.popleft()[1]
            if oldest is not None:
                oldest.written()
