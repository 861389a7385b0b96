"""One storage's way off the device and back, beside the computation.

    Departure(flat, …)   the copy out begins
    settle()             what the present stream is given from here on may have the memory: the caller lets it go
    fetch()              the way back begins
    go_on()              the next part of it does, if what it waits for is over
    back()               the bytes again, for the present stream
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
from memopt.offloading.host_memory import HostMemory, Room
from memopt.offloading.transfers import Arrival


class Departure(Protocol):
    def settle(self) -> None: ...
    def fetch(self) -> None: ...
    def go_on(self) -> None: ...
    def back(self) -> torch.Tensor: ...
    def landed(self) -> None: ...


class ToPinned:
    """From a CUDA device to pinned memory. stream: the one that the tensor was made on."""

    __slots__ = ("_arrival", "_device", "_out", "_room", "_stream")

    def __init__(self, flat: torch.Tensor, room: Room, stream: int) -> None:
        self._room, self._device, self._stream = room, flat.device, stream
        self._arrival: Arrival | None = None
        self._out = _C.copy_out(flat, room.memory, room.after, stream)

    def settle(self) -> None:
        _C.copy_await(self._device.index, self._out, self._stream)
        _C.copy_await(self._device.index, self._out)

    def fetch(self) -> None:
        if self._arrival is None:
            self._arrival = Arrival(self._room.memory, self._device, self._out)
            self._room.mark = self._arrival.ticket

    def go_on(self) -> None:
        """There are no parts: one stream carries it all."""

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._arrival is not None
        return self._arrival.tensor()

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

    def landed(self) -> None:
        self._read = self._flat = None


class ToDiskByHost:
    """From a CUDA device through pinned memory to a disk. The device's memory waits for the copy alone; the host waits
    for the disk where it has to be read, and where more than a few storages (`Backlog`) wait to be written."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_device",
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
        self, flat: torch.Tensor, room: DiskRoom, memory: HostMemory, staging: Room, stream: int
    ) -> None:
        self._room, self._memory, self._device, self._stream = room, memory, flat.device, stream
        self._nbytes = flat.numel()
        self._staging: Room | None = None
        self._out = _C.copy_out(flat, staging.memory, staging.after, stream)
        self._written = room.disk.write(staging.memory, room.offset, self._device.index, self._out)
        self._staging = staging
        self._read: _C.DiskJob | None = None
        self._arrival: Arrival | None = None

    def settle(self) -> None:
        _C.copy_await(self._device.index, self._out, self._stream)
        _C.copy_await(self._device.index, self._out)

    @property
    def is_written(self) -> bool:
        return self._written.over()

    def written(self) -> None:
        """Waits until it is; the pinned memory goes."""
        self._written.finish()
        self._staging = None

    def fetch(self) -> None:
        if self._read is not None or self._arrival is not None:
            return
        if self._staging is not None:
            self.written()
        staging = self._memory.take(self._nbytes)
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
        self._staging.mark = self._arrival.ticket
        self._read = self._staging = None

    def back(self) -> torch.Tensor:
        self.fetch()
        if self._arrival is None:
            self._arrive()
        assert self._arrival is not None
        return self._arrival.tensor()

    def landed(self) -> None:
        self._arrival = None

    def __del__(self) -> None:
        # Nobody wants it any more. The pinned memory must not be another's while the copy out still fills it.
        if getattr(self, "_staging", None) is not None and self._read is None and not sys.is_finalizing():
            with contextlib.suppress(OSError, _C.Error):  # what failed is of no concern either
                self._written.finish()


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
