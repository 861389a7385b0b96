"""What stages of a chain saved, kept off the device: the runs whose operation is ("fall", stage, "offload").

What goes are storages that the stage alone holds, each once, however many views of it were saved: no argument of the
stage, no parameter, none of its outputs, nothing that lives on elsewhere. A copy begins when the tensor is saved,
beside the rest of the stage. Then, in this order:

    ended    the stage has run. What its outputs hold stays; what changed since it was saved is copied again
    settle   what comes after waits for the copies, and the device's memory goes; from here to the next two it holds
             none of it. Until here, and from `fetch` on, all of it
    fetch    the way back begins (beside the computation where it can)
    tensor   a saved tensor is wanted

Host memory is taken in slots, one for each stage's saved set: pinned memory beside a CUDA device, or a file. They are
made all in one piece when the first is wanted, and used by step after step; more are only made for passes that overlap,
and what does not fit in its slot (of a larger batch) gets a place of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from memopt.checkpointing.disk import DiskFile, OnDisk
from memopt.checkpointing.offload import Offload, OnHost
from memopt.offloading.transfers import pinned_tensor

OPTION = "offload"  # of an operation
LEAST_BYTES = 1 << 16  # of a storage: 5 µs at 12 GB/s, what starting a copy takes
_ALIGNED = 512  # bytes


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def can_go(tensor: torch.Tensor, least_bytes: int = LEAST_BYTES) -> bool:
    """Whether the tensor's storage can be copied as bytes, and is worth it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= max(least_bytes, 1)
    )


class ChainOffload:
    """Where the stages of a chain keep what they offload.

    to: "cpu" for stages on a CUDA device, or a directory on a disk for stages on the CPU. slots: bytes of each stage's
    set, its storages aligned()."""

    def __init__(
        self, to: str, slots: Mapping[int, int] | None = None, *, least_bytes: int = LEAST_BYTES
    ) -> None:
        self.to, self.slots, self.least_bytes = to, dict(slots or {}), least_bytes
        self.made = 0  # pieces of slots
        # What each stage saved of its outputs last time, by position: not worth beginning to copy.
        self.outputs: dict[int, set[int]] = {}
        self._free, self._process = self._none(), os.getpid()

    def _none(self) -> dict[int, list[tuple[Place, int]]]:
        return {k: [] for k in self.slots}

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("to", "slots", "least_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def place(self, nbytes: int) -> Place:
        return Pinned(nbytes) if self.to == "cpu" else OnDiskPlace(self.to, nbytes)

    def slot(self, stage: int) -> Slot:
        if self._process != os.getpid():  # after a fork the slots are the parent's
            self._free, self._process = self._none(), os.getpid()
        free = self._free.get(stage)
        if free is None:
            return Slot(self, None, None, 0, 0)
        while True:
            try:
                place, offset = free.pop()
            except IndexError:
                self._make_slots()
            else:
                return Slot(self, free, place, offset, self.slots[stage])

    def _make_slots(self) -> None:
        nbytes = sum(map(aligned, self.slots.values()))
        place, offset = Pinned.exactly(max(nbytes, 1)) if self.to == "cpu" else self.place(nbytes), 0
        self.made += 1
        for stage, size in self.slots.items():
            self._free[stage].append((place, offset))
            offset += aligned(size)

    def begin(self, stage: int, given: Iterable[torch.Tensor]) -> OffloadedSet:
        """A run of the stage begins. given: what it does not hold alone."""
        return OffloadedSet(self, stage, given)


class Place(Protocol):
    """Room outside the device."""

    def keep(self, flat: torch.Tensor, offset: int, copies: Offload) -> OnHost | OnDisk: ...


class Pinned:
    """Of torch's cache of pinned memory, which rounds up to a power of two, and is fast to take and to give back."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    @classmethod
    def exactly(cls, nbytes: int) -> Pinned:
        """So many bytes and no more, for what is kept: a plan's, where twice as much may be more than the host has.
        MemoryError where the host cannot lock it."""
        place = cls.__new__(cls)
        place.memory = pinned_tensor(torch.device("cuda", torch.cuda.current_device()), nbytes)
        return place

    def keep(self, flat: torch.Tensor, offset: int, copies: Offload) -> OnHost | OnDisk:
        kept = copies.keep(flat, self.memory[offset : offset + flat.nbytes], held=True)
        assert kept is not None
        return kept


class OnDiskPlace:
    def __init__(self, path: str, nbytes: int) -> None:
        self.file = DiskFile(path, nbytes)

    def keep(self, flat: torch.Tensor, offset: int, copies: Offload) -> OnHost | OnDisk:
        return OnDisk(self.file, offset, flat)


class Slot:
    """Room for one saved set, until nothing holds it. The next user's copies come after this one's: the same stream
    carries them."""

    def __init__(
        self,
        offload: ChainOffload,
        free: list[tuple[Place, int]] | None,
        place: Place | None,
        offset: int,
        size: int,
    ) -> None:
        self.offload, self.free, self.place, self.offset, self.left = offload, free, place, offset, size
        self._begin = offset

    def take(self, nbytes: int) -> tuple[Place, int]:
        size = aligned(nbytes)
        if self.place is None or size > self.left:
            return self.offload.place(nbytes), 0
        offset = self.offset
        self.offset, self.left = offset + size, self.left - size
        return self.place, offset

    def __del__(self) -> None:
        if self.free is not None and self.place is not None:
            self.free.append((self.place, self._begin))


class Copy:
    """A storage that a stage saved: as long as it stays on the device itself (`storage`), else a copy of it."""

    __slots__ = ("_kept", "_place", "_slot", "_tensor", "position", "storage", "version")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.position = position
        self.version = -1  # that was copied
        self._tensor: torch.Tensor | None = tensor.detach()  # counts versions with the stage's own
        self._kept: OnHost | OnDisk | None = None
        self._slot: Slot | None = None
        self._place: tuple[Place, int] | None = None

    def start(self, slot: Slot, copies: Offload) -> None:
        """The storage as it is now is copied, unless it is already."""
        assert self._tensor is not None
        assert self.storage is not None
        if self.version == self._tensor._version:
            return
        if self._place is None:
            self._place, self._slot = slot.take(self.storage.nbytes()), slot
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        flat.set_(self.storage, 0, (self.storage.nbytes(),), (1,))
        place, offset = self._place
        self._kept = place.keep(flat, offset, copies)
        self.version = self._tensor._version

    def stay(self) -> None:
        self._tensor = self._kept = self._slot = self._place = None

    def go(self) -> None:
        """The storage goes, unless somebody else holds it."""
        assert self.storage is not None
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        ref = weakref.ref(self.storage)
        self.storage = self._tensor = None
        if (living := ref()) is not None:
            self.storage = living
            self.stay()

    def fetch(self) -> None:
        if self.storage is None and self._kept is not None:
            self._kept.fetch()

    def back(self) -> torch.UntypedStorage:
        if self.storage is not None:
            return self.storage
        assert self._kept is not None
        return self._kept.back().untyped_storage()


class Away:
    """A saved tensor, as a view of a storage that may be off the device."""

    __slots__ = ("copy", "device", "dtype", "offset", "size", "stride")

    def __init__(self, copy: Copy, tensor: torch.Tensor) -> None:
        self.copy = copy
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.copy.back(), self.offset, self.size, self.stride)


def unpacked(value: torch.Tensor | Away) -> torch.Tensor:
    return value.tensor() if isinstance(value, Away) else value.detach()


class OffloadedSet:
    """What one run of a stage saves. As a context around the run: an exception there leaves no copy on its way."""

    def __init__(self, offload: ChainOffload, stage: int, given: Iterable[torch.Tensor]) -> None:
        self.offload, self.stage = offload, stage
        self.given = {t.untyped_storage()._cdata for t in given if t.layout is torch.strided}
        self.copies: dict[int, Copy] = {}
        self.streams = Offload()
        self.slot: Slot | None = offload.slot(stage)
        self.expected = offload.outputs.get(stage, set())
        self.position = -1

    def __enter__(self) -> OffloadedSet:
        return self

    def __exit__(self, kind: Any, *raised: object) -> None:
        if kind is not None:
            self.settle()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | Away:
        self.position += 1
        if not can_go(tensor, self.offload.least_bytes):
            return tensor.detach()
        address = tensor.untyped_storage()._cdata
        if address in self.given or (tensor.device.type == "cuda") != (self.offload.to == "cpu"):
            return tensor.detach()
        copy = self.copies.get(address)
        if copy is None:
            copy = self.copies[address] = Copy(tensor, self.position)
        if copy.position not in self.expected:
            self._start(copy)
        return Away(copy, tensor)

    def _start(self, copy: Copy) -> None:
        assert self.slot is not None
        copy.start(self.slot, self.streams)

    def ended(self, out: Any) -> None:
        outputs = {
            leaf.untyped_storage()._cdata
            for leaf in pytree.tree_leaves(out)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        positions = set()
        for address in [address for address in self.copies if address in outputs]:
            copy = self.copies.pop(address)
            positions.add(copy.position)
            copy.stay()
        self.offload.outputs[self.stage] = positions
        for copy in self.copies.values():
            self._start(copy)

    def settle(self) -> None:
        self.streams.finish()
        for copy in self.copies.values():
            copy.go()
        self.copies.clear()
        self.slot = None
