"""One storage's way off the device and back, beside the computation: through pinned memory, to a disk, or both.

On a disk the room is in files without names (csrc/transfer/disk.h), until nothing refers to it. What is given back in a
file is used again only when the file is empty. So a pass that begins while another's graph lives, of which something is
back already, has a file of its own, and each goes with the last graph in it: what the files take is at most what lives,
and what was given back since the last pass began."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import threading
import weakref
from collections import deque

import torch

from memopt import _C
from memopt._offload.pinned_memory import (
    ALIGNED,
    CopyIn,
    IncomingBytes,
    PinnedPool,
    PinnedRoom,
    aligned,
    host_memory,
)

LEAST_BYTES = 1 << 16  # of a storage: 5 µs at 12 GB/s, what starting a copy takes
MOST = 1 << 46  # bytes of a file, so that its ring never goes round; ext4 ends at 16 TiB, others later


# ---- room on a disk --------------------------------------------------------------------------------------------------


class DiskSpace:
    """One file, written and read by one thread of the engine's. Raises OSError where there can be none."""

    def __init__(self, directory: str) -> None:
        self.disk, self._ring = _C.Disk(directory), _C.Ring(MOST, ALIGNED)
        self.has_holes = False

    def take(self, nbytes: int) -> DiskRoom:
        found = self._ring.take(nbytes)
        if found is None:
            raise OSError(errno.EFBIG, f"{nbytes} more bytes exceed the {_C.format_size(MOST)} of one file")
        return DiskRoom(self, *found[:2])

    def give(self, slot: int) -> None:
        self._ring.give(slot)
        self.has_holes = self._ring.held()[0] > 0


class DiskRoom:
    __slots__ = ("_slot", "_space", "disk", "offset")

    def __init__(self, space: DiskSpace, slot: int, offset: int) -> None:
        self._space, self._slot, self.disk, self.offset = space, slot, space.disk, offset

    def __del__(self) -> None:
        self._space.give(self._slot)


_spaces: weakref.WeakValueDictionary[tuple[int, str], DiskSpace] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def disk_space(directory: str) -> DiskSpace:
    """Return the disk space for a new pass: the process's file in that directory that is in use and has had nothing
    freed in it, else a new one. A forked child has its own."""
    key = os.getpid(), os.path.abspath(directory)
    with _lock:
        space = _spaces.get(key)
        if space is None or space.has_holes:
            space = _spaces[key] = DiskSpace(key[1])
        return space


def give_up(space: DiskSpace) -> None:
    """Stop using a file that failed; the next request gets another one."""
    with _lock:
        for key in [key for key, value in _spaces.items() if value is space]:
            del _spaces[key]


# ---- a storage's way -------------------------------------------------------------------------------------------------


def can_go(tensor: torch.Tensor, least_bytes: int = LEAST_BYTES) -> bool:
    """Return whether the tensor's storage can be copied as bytes, and is worth it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= max(least_bytes, 1)
    )


def uses_of(storage: int) -> int:
    """Return the number of C++ references to a storage; its Python object, once it exists, counts as torch counts
    it."""
    return int(torch._C._storage_Use_Count(storage))  # type: ignore[attr-defined]


@functools.cache
def uses_by_one() -> int:
    """Return uses_of() for a storage that one tensor holds."""
    tensor = torch.empty(1)
    return uses_of(tensor.untyped_storage()._cdata)


class StorageTransfer:
    """A storage whose copy out begins when this is made; flat: the whole of it, as torch.uint8."""

    __slots__ = ("__weakref__",)

    def settle(self) -> None:
        """Make the memory available to later work of the current stream: the caller frees it."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Begin the way back, before anybody wants it. Raises MemoryError where there is no room for that."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Begin the next part of the way back, if what it waits for is over. Return whether one is still to begin."""
        return False

    def back(self) -> torch.Tensor:
        """Return the bytes, for the current stream."""
        raise NotImplementedError

    def join(self, storage: torch.UntypedStorage) -> None:
        """Make the same bytes, which have been returned already, available to the current stream too."""

    def forget(self) -> None:
        """Drop returned bytes that are not needed for now: the next fetch() reads them again."""
        raise NotImplementedError


class DiskTransfer(StorageTransfer):
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

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._read is not None
        assert self._flat is not None
        self._read.finish()
        return self._flat

    def forget(self) -> None:
        self._read = self._flat = None


class _DeviceTransfer(StorageTransfer):
    """From a CUDA device to pinned memory, at first. stream: the one that the tensor was made on."""

    __slots__ = ("_copy_in", "_device", "_incoming", "_out", "_stream")

    def __init__(self, flat: torch.Tensor, room: PinnedRoom, stream: int) -> None:
        self._device, self._stream = flat.device, stream
        self._incoming: IncomingBytes | None = None
        self._copy_in: CopyIn | None = None
        self._out = _C.copy_out(flat, room.memory, room.after, stream)

    def settle(self) -> None:
        _C.copy_await(self._device.index, self._out, self._stream)
        _C.copy_await(self._device.index, self._out)

    def join(self, storage: torch.UntypedStorage) -> None:
        if self._copy_in is not None:  # else it has never left
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self._copy_in.join(flat.set_(storage))

    def forget(self) -> None:
        self._incoming = None

    def _copy_back(self, room: PinnedRoom, after: int = 0) -> None:
        assert self._incoming is not None
        self._copy_in = self._incoming.begin(room.memory, after)
        room.mark = self._copy_in.ticket


class PinnedTransfer(_DeviceTransfer):
    """From a CUDA device to pinned memory. stream: the one that the tensor was made on."""

    __slots__ = ("_room",)

    def __init__(self, flat: torch.Tensor, room: PinnedRoom, stream: int) -> None:
        self._room = room
        super().__init__(flat, room, stream)

    def fetch(self) -> None:
        if self._incoming is None:
            self._incoming = IncomingBytes(self._room.memory.numel(), self._device)
            self._copy_back(self._room, self._out)

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._incoming is not None
        return self._incoming.tensor()

    def copy_to(self, flat: torch.Tensor, after: int = 0, first: int = 0) -> CopyIn:
        """Begin to copy the bytes from the first on into memory of the device that the current stream had last, or that
        copy out."""
        owner, host = torch.cuda.current_stream(self._device), self._room.memory[first : first + flat.numel()]
        copy = CopyIn(owner, _C.copy_in(host, flat, max(self._out, after), owner.cuda_stream))
        self._room.mark = copy.ticket
        return copy


class StagedDiskTransfer(_DeviceTransfer):
    """From a CUDA device through pinned memory to a disk. The device's memory waits for the copy alone; the host waits
    for the disk where it has to be read, and where more than a few storages (`WriteQueue`) wait to be written.

    limit: bytes of pinned memory in all, which only what is wanted at once may exceed; None for none."""

    __slots__ = ("_limit", "_memory", "_nbytes", "_read", "_room", "_staging", "_written")

    def __init__(
        self,
        flat: torch.Tensor,
        room: DiskRoom,
        memory: PinnedPool,
        staging: PinnedRoom,
        stream: int,
        limit: int | None = None,
    ) -> None:
        self._room, self._memory = room, memory
        self._nbytes, self._limit = flat.numel(), limit
        self._staging: PinnedRoom | None = None
        self._read: _C.DiskJob | None = None
        self._written: _C.DiskJob | None = None
        super().__init__(flat, staging, stream)
        self._staging = staging
        self._written = room.disk.write(staging.memory, room.offset, self._device.index, self._out)

    @property
    def is_written(self) -> bool:
        assert self._written is not None
        return self._written.over()

    def written(self) -> None:
        """Wait until the storage is written; then free the pinned memory."""
        assert self._written is not None
        self._written.finish()
        self._staging = None

    def fetch(self) -> None:
        self._begin_read(self._limit)

    def _begin_read(self, limit: int | None) -> None:
        if self._incoming is not None:
            return
        assert self._written is not None
        if self._staging is not None:
            self.written()
        staging = self._memory.take(self._nbytes, limit)
        if staging is None:
            raise MemoryError(
                f"{self._nbytes} bytes of pinned memory are not available to read what was offloaded "
                "to a disk"
            )
        incoming = IncomingBytes(self._nbytes, self._device)
        # What was copied in from this memory last may still be on its way.
        self._read = self._room.disk.read(staging.memory, self._written, self._device.index, staging.after)
        self._staging, self._incoming = staging, incoming

    def advance(self) -> bool:
        if self._read is not None and self._read.over():
            self._read_is_over()
        return self._read is not None

    def _read_is_over(self) -> None:
        assert self._read is not None
        assert self._staging is not None
        self._read.finish()
        self._copy_back(self._staging)
        self._read = self._staging = None

    def back(self) -> torch.Tensor:
        least = self._memory.nbytes + aligned(self._nbytes)
        self._begin_read(None if self._limit is None else max(self._limit, least))
        if self._read is not None:
            self._read_is_over()
        assert self._incoming is not None
        return self._incoming.tensor()

    def __del__(self) -> None:
        # Nobody wants it any more. The pinned memory must not be another's while it is written to the disk, or the copy
        # out still fills it: for that no disk waits that has failed before, or has refused the job.
        if getattr(self, "_staging", None) is not None and self._read is None and not sys.is_finalizing():
            with contextlib.suppress(OSError, _C.Error):  # what failed is of no concern either
                if self._written is not None:
                    self._written.finish()
            with contextlib.suppress(_C.Error):
                _C.copy_wait(self._device.index, self._out, 1e8)


class WriteQueue:
    """Staged transfers still to be written: of more than `limit` bytes, the oldest is waited for."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[weakref.ref[StagedDiskTransfer], int]] = deque()
        self._nbytes = 0

    def begin(
        self, flat: torch.Tensor, space: DiskSpace, stream: int, limit: int, memory_limit: int | None = None
    ) -> StagedDiskTransfer | None:
        """Begin a transfer behind at most `limit` bytes of others. None where it would take more pinned memory than
        `memory_limit` in all, or than the host can pin."""
        nbytes, memory = flat.numel(), host_memory(flat.device)
        self.make_room(max(limit, nbytes))
        staging = memory.take(nbytes, memory_limit)
        if staging is None:
            self.make_room(0)
            staging = memory.take(nbytes, memory_limit)
        if staging is None:
            return None
        transfer = StagedDiskTransfer(flat, space.take(nbytes), memory, staging, stream, memory_limit)
        self._waiting.append((weakref.ref(transfer), nbytes))
        self._nbytes += nbytes
        return transfer

    def make_room(self, limit: int) -> None:
        while self._waiting:
            oldest = self._waiting[0][0]()
            if oldest is not None and self._nbytes <= limit and not oldest.is_written:
                return
            self._nbytes -= self._waiting.popleft()[1]
            if oldest is not None:
                oldest.written()
