"""Saved sets of a schedule's stages, kept off the device: the runs whose operation is ("fall", stage, "offload").

What goes are storages that the stage alone holds, each once, however many views of it were saved: no argument of the
stage, no parameter, none of its outputs, nothing that lives on elsewhere. A copy begins when the tensor is saved,
beside the rest of the stage. Then, in this order:

    ended    the stage has run. What its outputs hold stays; what changed since it was saved is copied again
    settle   what comes after waits for the copies, and the device's memory goes; from here to the next two it holds
             none of it. Until here, and from `fetch` on, all of it
    fetch    the way back begins, beside the computation
    tensor   a saved tensor is wanted

A set that stays in 8 bits (codes.py) is coded when it is settled, and each of its storages decoded when it is wanted.

The copies are those of transfers.py. Pinned memory for all sets is taken in one piece when the first of it is wanted,
and a file on a disk then too; both are used by step after step. Which places there are, and how fast they are, is asked
before a schedule is made (destination, bandwidth)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._offload.codes import EIGHT_BITS, CodedTransfer, can_code, code_bytes
from memopt._offload.pinned_memory import PinnedPool, index_of
from memopt._offload.transfers import (
    LEAST_BYTES,
    DiskSpace,
    DiskTransfer,
    PinnedTransfer,
    StorageTransfer,
    WriteQueue,
    can_go,
    uses_by_one,
    uses_of,
)
from memopt._runtime import device_clock

OPTION = "offload"  # of an operation
NBYTES = 1 << 24  # of a trial copy: a few milliseconds on anything that is worth it
TRIALS = 3


# ---- sets ------------------------------------------------------------------------------------------------------------


class ScheduleOffload:
    """The place for what stages save: off the device, or on it in 8 bits.

    to: "cpu" for stages on a CUDA device, a directory on a disk, or "8bit". sets: bytes of each stage's, its storages
    aligned(). least_bytes: of a storage that goes."""

    def __init__(
        self, to: str, sets: Mapping[int, int] | None = None, *, least_bytes: int = LEAST_BYTES
    ) -> None:
        self.to, self.sets, self.least_bytes = to, dict(sets or {}), least_bytes
        # What each stage saved of its outputs last time, by position: not worth beginning to copy.
        self.outputs: dict[int, set[int]] = {}
        self._memory: dict[int, PinnedPool] = {}  # by device
        self._space: DiskSpace | None = None
        self._writes, self._process = WriteQueue(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("to", "sets", "least_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def begin(self, stage: int, given: Any) -> OffloadedSet:
        """Begin a run of the stage. given: tensors, in any structure, that it does not hold alone."""
        return OffloadedSet(self, stage, given)

    @property
    def is_coded(self) -> bool:
        return self.to == EIGHT_BITS

    def transfer(self, flat: torch.Tensor) -> StorageTransfer:
        """Begin a storage's copy out; it may be used by the present stream. flat: its bytes, or its elements where they
        are coded. Raises MemoryError or OSError where the place has no room for it."""
        if self.is_coded:
            stream = torch.cuda.current_stream(flat.device).cuda_stream if flat.is_cuda else 0
            return CodedTransfer(flat, stream)
        if not flat.is_cuda:
            return DiskTransfer(flat, self._disk().take(flat.numel()))
        transfer: StorageTransfer | None
        stream = torch.cuda.current_stream(flat.device).cuda_stream
        if self.to == "cpu":
            room = self._host(flat.device).take(flat.numel())
            transfer = None if room is None else PinnedTransfer(flat, room, stream)
        else:
            transfer = self._writes.begin(flat, self._disk(), stream, 2 * max(self.sets.values(), default=0))
        if transfer is None:
            raise MemoryError(
                f"the host cannot lock {flat.numel()} more bytes for the tensors that stages offload: raise `ulimit "
                "-l` or the memory limit of the container, or give auto_checkpoint a larger memory_budget"
            )
        return transfer

    def written(self) -> None:
        """Wait until all copies have been written."""
        self._writes.make_room(0)

    def _host(self, device: torch.device) -> PinnedPool:
        index = index_of(device)
        if index not in self._memory:
            memory = PinnedPool(torch.device("cuda", index))
            if self.sets and not self._memory:
                memory.reserve(sum(self.sets.values()))
            self._memory[index] = memory
        return self._memory[index]

    def _disk(self) -> DiskSpace:
        if self._process != os.getpid():  # after a fork the file is the parent's
            self._space, self._process = None, os.getpid()
        if self._space is None:
            self._space = DiskSpace(self.to)
        return self._space

    def errors(self) -> DiskErrors:
        """Name the remedies in errors of the disk; after one, the next step uses another file."""
        return DiskErrors(self.to, self._leave_file)

    def _leave_file(self) -> None:
        self._space = None


class OffloadedStorage:
    """A storage that a stage saved: as long as it stays on the device itself (`storage`), else a copy of it."""

    __slots__ = (
        "__weakref__",
        "_offload",
        "_tensor",
        "_transfer",
        "_version",
        "dtype",
        "position",
        "storage",
    )

    def __init__(self, tensor: torch.Tensor, position: int, offload: ScheduleOffload) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.position, self._offload = position, offload
        self.dtype: torch.dtype | None = tensor.dtype  # of the tensors that were saved of it; None of several
        self._version = -1  # that was copied
        self._tensor: torch.Tensor | None = tensor.detach()  # counts versions with the stage's own
        self._transfer: StorageTransfer | None = None

    def start(self) -> None:
        """Begin to copy the storage as it is now, unless that has begun."""
        assert self._tensor is not None
        assert self.storage is not None
        if self._version == self._tensor._version:
            return
        self._transfer = None  # another may have its room
        with self._offload.errors():
            dtype = self.dtype if self._offload.is_coded else torch.uint8
            flat = torch.empty(0, dtype=dtype, device=self.storage.device)
            self._transfer = self._offload.transfer(flat.set_(self.storage))
        self._version = self._tensor._version

    def stay(self) -> None:
        self._tensor = self._transfer = None

    def bytes_alone(self) -> int:
        """Return the storage's bytes, 0 if somebody else holds it."""
        assert self.storage is not None
        return self.storage.nbytes() if uses_of(self.storage._cdata) == uses_by_one() else 0

    def code(self, largest: int) -> bool:
        """Code the storage, or have it stay; return whether it may go. largest: bytes of the set's largest one."""
        nbytes = self.bytes_alone()
        goes = nbytes > 0 and can_code(self.dtype, nbytes, largest)
        if goes:
            self.start()
        else:
            self.stay()
        return goes

    def leave(self) -> None:
        """Let the storage go once it is copied."""
        if self._transfer is not None:  # an exception may have come before it
            with self._offload.errors():
                self._transfer.settle()
        self.storage = self._tensor = None

    def go(self) -> None:
        """Let the storage go once it is copied, unless somebody else holds it."""
        assert self.storage is not None
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        ref = weakref.ref(self.storage)
        self.leave()
        if (living := ref()) is not None:
            self.storage = living
            self.stay()

    def fetch(self) -> None:
        if self.storage is None and self._transfer is not None:
            with self._offload.errors():
                self._transfer.fetch()

    def advance(self) -> bool:
        """Return whether a part of the way back is still to begin."""
        if self._transfer is None:
            return False
        try:
            with self._offload.errors():
                return self._transfer.advance()
        except torch.OutOfMemoryError:
            return True  # not wanted yet: then there may be room

    def back(self) -> torch.UntypedStorage:
        if self.storage is not None:
            return self.storage
        assert self._transfer is not None
        with self._offload.errors():
            return self._transfer.back().untyped_storage()


class OffloadedTensor:
    """A saved tensor, as a view of a storage that may be off the device."""

    __slots__ = ("device", "dtype", "offset", "size", "storage", "stride")

    def __init__(self, storage: OffloadedStorage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.storage.back(), self.offset, self.size, self.stride)


def unpacked(value: torch.Tensor | OffloadedTensor) -> torch.Tensor:
    return value.tensor() if isinstance(value, OffloadedTensor) else value.detach()


def _storages_in(value: Any) -> set[int]:
    """Addresses of the storages of all dense tensors in any structure."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return {leaf.untyped_storage()._cdata for leaf in leaves if leaf.layout is torch.strided}


class OffloadedSet:
    """The saved set of one run of a stage. As a context around the run: after an exception no copy is on its way."""

    def __init__(self, offload: ScheduleOffload, stage: int, given: Any) -> None:
        self.offload, self.stage, self.given = offload, stage, _storages_in(given)
        self.storages: dict[int, OffloadedStorage] = {}
        self.expected = offload.outputs.get(stage, set())
        self.position = -1

    def __enter__(self) -> OffloadedSet:
        return self

    def __exit__(self, kind: Any, *raised: object) -> None:
        if kind is not None and not self.offload.is_coded:
            with contextlib.suppress(OSError):
                self.settle()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | OffloadedTensor:
        self.position += 1
        if not can_go(tensor, self.offload.least_bytes):
            return tensor.detach()
        address = tensor.untyped_storage()._cdata
        if address in self.given or (self.offload.to == "cpu" and not tensor.is_cuda):
            return tensor.detach()
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return tensor.detach()  # each replay would copy again, with memory that has long been another's
        storage = self.storages.get(address)
        if storage is None:
            storage = self.storages[address] = OffloadedStorage(tensor, self.position, self.offload)
        if storage.dtype != tensor.dtype:
            storage.dtype = None
        if storage.position not in self.expected and not self.offload.is_coded:
            storage.start()
        return OffloadedTensor(storage, tensor)

    def ended(self, out: Any) -> None:
        outputs, positions = _storages_in(out), set()
        for address in [address for address in self.storages if address in outputs]:
            storage = self.storages.pop(address)
            positions.add(storage.position)
            storage.stay()
        self.offload.outputs[self.stage] = positions
        for storage in self.storages.values():
            if not self.offload.is_coded:
                storage.start()

    def leave(self) -> None:
        """Let all memory go, also of what others hold for now."""
        for storage in self.storages.values():
            storage.leave()
        self.storages.clear()

    def settle(self) -> None:
        """Free all memory; raise the first error once everything is settled."""
        failure, largest = None, 0
        if self.offload.is_coded:
            largest = max((storage.bytes_alone() for storage in self.storages.values()), default=0)
        for storage in self.storages.values():
            try:
                if not self.offload.is_coded or storage.code(largest):
                    storage.go()
            except OSError as error:
                failure = failure or error
                storage.stay()
        self.storages.clear()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # which holds this frame


# ---- places and their speed ------------------------------------------------------------------------------------------


class DiskErrors:
    """A context in which errors of the disk get the remedies that auto_checkpoint() has.

    A generator's context would keep a failed step's tensors under CPython 3.13, in a cycle with its frames.

    Args:
        path: The directory on the disk.
        failed: Is called at an error.
    """

    def __init__(self, path: str, failed: Callable[[], None] = lambda: None) -> None:
        self._path, self._failed = path, failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        self._failed()
        raise type(error)(
            error.errno,
            f"{(error.strerror or str(error)).removeprefix(self._path + ': ')}; stages offload their saved tensors "
            "there: give auto_checkpoint's to= a writable directory with enough space, or a larger memory_budget",
            self._path,
        ) from error


class Bandwidth(NamedTuple):
    """Bytes a second from the device and back to it, beside the computation."""

    out: float
    back: float

    def forward(self, seconds: float, nbytes: int) -> float:
        return max(seconds, nbytes / self.out)

    def backward(self, seconds: float, nbytes: int) -> float:
        return max(seconds, nbytes / self.back)


class CodingSpeed(Bandwidth):
    """Bytes of codes a second that are made and read, by the computation's own stream."""

    def forward(self, seconds: float, nbytes: int) -> float:
        return seconds + nbytes / self.out

    def backward(self, seconds: float, nbytes: int) -> float:
        return seconds + nbytes / self.back


def destination(to: str | os.PathLike[str] | None, device: torch.device) -> str | None:
    """`to` as ScheduleOffload takes it. ValueError or OSError, with what to give instead, where it is none for stages
    on this device."""
    if to is None:
        return None
    where = os.fspath(to)
    if where == "cpu":
        if device.type != "cuda":
            raise ValueError(
                f'to="cpu" is for a model on a CUDA device, but this one is on {device.type}: copies in the '
                'memory that already holds the tensors would gain nothing; give "8bit", or the path of a directory on '
                "a disk"
            )
        return where
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"to={where!r}: tensors on {device.type} cannot be offloaded, only those on a CUDA device or the CPU"
        )
    if where == EIGHT_BITS:
        return where
    if not os.path.isdir(where):
        said = f'to={where!r}: there is no such directory: give "cpu", "8bit", or a directory on a disk'
        raise FileNotFoundError(errno.ENOENT, said, where)
    with DiskErrors(where):
        DiskSpace(where)  # that it can be written to is better known now
    return os.path.abspath(where)


def bandwidth(to: str, device: torch.device) -> Bandwidth:
    """Measured with copies or codes of 16 MiB, which live for as long as that takes, once in a process for each device
    and disk."""
    return _measured(to, device, 0 if to in ("cpu", EIGHT_BITS) else os.stat(to).st_dev)


@cache
def _measured(to: str, device: torch.device, disk: int) -> Bandwidth:
    del disk  # what may be mounted there changes
    offload = ScheduleOffload(to, {0: NBYTES})
    flat = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    kind, nbytes = Bandwidth, NBYTES
    if offload.is_coded:  # elements of any dtype take about the same
        flat = flat.view(torch.float32)
        kind, nbytes = CodingSpeed, code_bytes(NBYTES, torch.float32)
    seconds, clock = [], device_clock.clock
    for _ in range(TRIALS):
        with clock.running():
            times = [clock.now(device)]
            transfer = offload.transfer(flat)
            transfer.settle()
            offload.written()
            times.append(clock.now(device))
            transfer.back()
            times.append(clock.now(device))
        seconds.append([clock.between(*pair) for pair in itertools.pairwise(times)])
    return kind(*(nbytes / max(min(column), 1e-9) for column in zip(*seconds, strict=True)))
