"""Optimizer states in a file on a disk, without a name (csrc/transfer/disk.h).

What stands for a state in the optimizer's dict is a DiskState: chunks, each a run of the state's bytes with its own
place in the file, read, written and checked as one. In a step they pass through pinned memory, an area a way
(`Passage`):

    read        begins while its area has room, in the order of the turns, behind the copy in that had the room last
    copy in     begins once the read is over; for this the host waits
    copy out    begins once the turn has been updated; for its room the host waits until an older chunk is written
    write       begins behind the copy out
    the end     comes once all is written; for this the host waits

A chunk that cannot be written is kept in the host's memory: the step is taken to its end, and then raises.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt import _C
from memopt._offload.host_parameters import file_block, room
from memopt._offload.pinned_memory import (
    ALIGNED,
    FOREVER,
    CopyIn,
    PinnedRoom,
    aligned,
    dense_bytes,
    index_of,
    pinned_tensor,
    slot_in,
)
from memopt.optim._gradient_hooks import StandIn
from memopt.optim._state_layout import FACTORS, GRAIN, elements_per, is_plain

if TYPE_CHECKING:
    from memopt.optim._turns import Traveller

CHUNK = 32 << 20  # bytes that a chunk has at most
AREA = 4 * CHUNK  # bytes that wait in pinned memory each way: for the disk, or for the device
# Bytes of a turn at most, but for a parameter that cannot be cut: an area has two turns' states.
DISK_TURN = 64 << 20

aten = torch.ops.aten


class Chunk:
    """first: of the state's bytes. at: its place in the file. written: the job whose bytes are there. kept: the bytes
    themselves, where they could not be written."""

    __slots__ = ("at", "first", "kept", "nbytes", "written")

    def __init__(self, first: int, nbytes: int, at: int) -> None:
        self.first, self.nbytes, self.at = first, nbytes, at
        self.written: _C.DiskJob | None = None
        self.kept: Tensor | None = None


class DiskState(StandIn):
    """A state of a parameter, or of a piece of one, whose elements are on a disk. It is on the meta device; cpu() and
    pickling read it. Any other operation is refused."""

    file: StateFile
    chunks: Sequence[Chunk]
    like: Tensor

    def __init__(self, like: Tensor, file: StateFile, chunks: Sequence[Chunk]) -> None:
        self.like, self.file, self.chunks = like, file, chunks

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return args[0]
        if func is aten._to_copy.default:
            return func(args[0].read(), **(kwargs or {}))
        raise RuntimeError(
            f"{func} of an optimizer's state that offload_states= keeps in a file on a disk: read "
            "optimizer.state_dict(), or the state's cpu()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    def row(self, first: int, last: int) -> DiskState:
        """Return what stands for these of its elements in the order of memory; chunks begin and end with them."""
        begin, end = first * self.itemsize, last * self.itemsize
        chunks = [chunk for chunk in self.chunks if begin <= chunk.first < end]
        return DiskState(torch.empty(last - first, dtype=self.dtype, device="meta"), self.file, chunks)

    def read(self, into: Tensor | None = None) -> Tensor:
        """Return its values in the host's memory."""
        if into is None:
            into = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype)
        flat = dense_bytes(into)
        assert flat is not None
        base = self.chunks[0].first
        self.file.read(
            (chunk, flat[chunk.first - base : chunk.first - base + chunk.nbytes]) for chunk in self.chunks
        )
        return into


def here(states: dict[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's states with those on a disk read, into pages of another file there: the system takes these
    from memory when it has other uses for it."""
    found = [s for held in states.values() for s in held.values() if isinstance(s, DiskState)]
    if not found:
        return states
    sizes: dict[str, int] = {}
    for state in found:
        sizes[state.file.directory] = sizes.get(state.file.directory, 0) + room(state.like)
    blocks = {
        directory: file_block(directory, size, "state_dict() of states on a disk")
        for directory, size in sizes.items()
    }

    def value(state: Any) -> Any:
        return (
            state.read(blocks[state.file.directory].take(state.like))
            if isinstance(state, DiskState)
            else state
        )

    return defaultdict(
        dict, {p: {name: value(state) for name, state in held.items()} for p, held in states.items()}
    )


# ---- the file --------------------------------------------------------------------------------------------------------


class StateFile:
    """One optimizer's states in a directory. failure: what a step has met; no further one is taken."""

    def __init__(self, directory: str) -> None:
        self.directory, self.failure = directory, ""
        self._end = 0
        self._areas: dict[torch.device, tuple[_Area, _Area]] = {}
        try:
            self.disk = self.open(directory)
        except OSError as error:
            raise OSError(error.errno, f"offload_states={directory!r}: {error.strerror}") from error

    @staticmethod
    def open(directory: str) -> _C.Disk:
        return _C.Disk(directory)

    def reserve(self, nbytes: int) -> int:
        """Take so many bytes of the disk, and return where they begin."""
        at, self._end = self._end, self._end + nbytes
        try:
            self.disk.reserve(at, nbytes)
        except OSError as error:
            self._end = at
            stat = os.statvfs(self.directory)
            raise OSError(
                error.errno,
                f"offload_states={self.directory!r}: {nbytes} bytes are needed there for the states of a parameter, "
                f"beside {at} bytes of others', and {stat.f_bavail * stat.f_frsize} are free: {error.strerror}",
            ) from error
        return at

    def read(self, wanted: Iterable[tuple[Chunk, Tensor]]) -> None:
        """Read chunks into the host's memory."""
        jobs = []
        for chunk, flat in wanted:
            if chunk.kept is not None:
                flat.copy_(chunk.kept)
            else:
                assert chunk.written is not None
                jobs.append(self.disk.read(flat, chunk.written))
        for job in jobs:
            job.finish()

    def areas(self, device: torch.device, nbytes: int) -> tuple[_Area, _Area]:
        """Return pinned memory for so many bytes that pass, or for as many as may."""
        held = self._areas[device][0].nbytes if device in self._areas else 0
        if (size := min(nbytes, AREA)) > held:
            self._areas.pop(device, None)  # before others are taken
            self._areas[device] = _Area(device, size), _Area(device, size)
        return self._areas[device]

    def fail(self, error: Exception, what: str) -> None:
        self.failure = self.failure or f"offload_states={self.directory!r}: {error}; {what}"

    def check(self) -> None:
        """Raise OSError if a step has failed to read or to write."""
        if self.failure:
            raise OSError(errno.EIO, self.failure)


class _Area:
    """Host memory, given out in the order in which it is used."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            if device.type == "cuda":
                self._memory = pinned_tensor(device, nbytes)
            else:  # direct I/O wants it aligned
                flat = torch.empty(nbytes + ALIGNED, dtype=torch.uint8)
                self._memory = flat[-flat.data_ptr() % ALIGNED :][:nbytes]
        except MemoryError as error:
            raise MemoryError(
                f"the host cannot lock {nbytes} bytes of memory for optimizer states on their way to and from a disk: "
                "raise `ulimit -l` or the memory limit of the container"
            ) from error
        self._ring = _C.Ring(nbytes, ALIGNED)

    def take(self, nbytes: int) -> PinnedRoom | None:
        return slot_in(self._memory, self._ring, nbytes)


class Passage:
    """Chunks' way from the disk to a device and back. wanted: those that will come, in that order."""

    def __init__(self, file: StateFile, device: torch.device, wanted: Sequence[Chunk], nbytes: int) -> None:
        self._file, self._device = file, device
        self._in, self._out = file.areas(device, nbytes)
        self._wanted = deque(wanted)
        self._reading: deque[tuple[Chunk, PinnedRoom, _C.DiskJob]] = deque()
        self._writing: deque[tuple[Chunk, PinnedRoom, int, _C.DiskJob]] = deque()
        self._index = index_of(device) if device.type == "cuda" else 0

    def ahead(self) -> None:
        """Begin reads while there is room."""
        while self._wanted and (space := self._in.take(self._wanted[0].nbytes)) is not None:
            chunk = self._wanted.popleft()
            assert chunk.written is not None
            job = self._file.disk.read(space.memory, chunk.written, self._index, space.after)
            self._reading.append((chunk, space, job))

    def come(self, state: DiskState, there: Tensor, after: int) -> CopyIn | None:
        """Begin to copy a state there, behind the copy out of that ticket. Waits for the disk."""
        flat, base = dense_bytes(there), state.chunks[0].first
        assert flat is not None
        owner, ticket = torch.cuda.current_stream(there.device) if there.is_cuda else None, 0
        for chunk in state.chunks:
            if not self._reading:
                self.ahead()
            found, space, job = self._reading.popleft()
            assert found is chunk
            try:
                job.finish()
            except (OSError, _C.Error) as error:
                self._file.fail(
                    error,
                    f"of these {state.nbytes} bytes of a state of {tuple(state.shape)} not all can be read: parameters "
                    "before that one were stepped, it and those behind it were not; load a state dict that was saved",
                )
                self._file.check()
            part = flat[chunk.first - base :][: chunk.nbytes]
            if owner is None:
                part.copy_(space.memory)
            else:
                space.mark = ticket = _C.copy_in(space.memory, part, after, owner.cuda_stream)
            del found, space
            self.ahead()
        return None if owner is None else CopyIn(owner, ticket)

    def go(self, state: DiskState, there: Tensor) -> int:
        """Begin to copy it out and to write it; return the ticket of the copy out. Waits where no room is left."""
        flat, base, ticket = dense_bytes(there), state.chunks[0].first, 0
        assert flat is not None
        for chunk in state.chunks:
            while (space := self._out.take(chunk.nbytes)) is None:
                self._settle()
            part = flat[chunk.first - base :][: chunk.nbytes]
            if part.is_cuda:
                ticket = _C.copy_out(part, space.memory)
            else:
                space.memory.copy_(part)
            try:
                job = self._file.disk.write(space.memory, chunk.at, self._index, ticket)
            except (OSError, _C.Error) as error:
                self._keep(chunk, space, ticket, error)
            else:
                self._writing.append((chunk, space, ticket, job))
        return ticket

    def finish(self) -> None:
        """Wait until all is written, and begin no more."""
        self._wanted.clear()
        self._reading.clear()
        while self._writing:
            self._settle()

    def _settle(self) -> None:
        chunk, space, ticket, job = self._writing.popleft()
        try:
            job.finish()
        except (OSError, _C.Error) as error:
            self._keep(chunk, space, ticket, error)
        else:
            chunk.written, chunk.kept = job, None

    def _keep(self, chunk: Chunk, space: PinnedRoom, ticket: int, error: Exception) -> None:
        if ticket:
            _C.copy_wait(self._index, ticket, FOREVER)
        chunk.kept = space.memory.clone()
        self._file.fail(
            error,
            "the step was taken, and what could not be written of its states is in the host's memory: go on with "
            "optimizer.load_state_dict(optimizer.state_dict()), with another directory in the param groups' "
            "'offload_states' where this one stays faulty",
        )


# ---- a parameter's ---------------------------------------------------------------------------------------------------


class DiskStates:
    """A parameter's states on a disk. length: the elements of each piece that it is stepped in, 0 for one step."""

    def __init__(self, file: StateFile) -> None:
        self.file, self.length = file, 0
        self._at: dict[str, DiskState] = {}

    def take(self, p: Tensor, states: dict[str, Any]) -> None:
        """Write the states that are not here yet, but for the count of steps. Raises OSError with nothing changed."""
        found = {
            name: value
            for name, value in states.items()
            if name != "step"
            and isinstance(value, Tensor)
            and not isinstance(value, DiskState)
            and value.nbytes
        }
        if not found:
            return
        if not self.names(states):
            self.length = _length(p, states)
        made = self._room_for(p, found)
        device = next((value.device for value in found.values() if value.is_cuda), torch.device("cpu"))
        total = sum(aligned(chunk.nbytes) for state in made.values() for chunk in state.chunks)
        passage = Passage(self.file, device, (), total)
        for name, value in found.items():
            passage.go(made[name], value)
        passage.finish()
        self.file.check()
        self._at = {name: value for name, value in self._at.items() if states.get(name) is value} | made
        states.update(made)

    def _room_for(self, p: Tensor, found: dict[str, Tensor]) -> dict[str, DiskState]:
        """Return what will stand for these states, where such states had their room before or in a new one."""
        runs = {name: self._runs(p, value) for name, value in found.items()}
        chunks = {
            name: self._at[name].chunks
            for name in runs
            if name in self._at and [(c.first, c.nbytes) for c in self._at[name].chunks] == runs[name]
        }
        needed = sum(aligned(size) for name in runs if name not in chunks for _, size in runs[name])
        at = self.file.reserve(needed) if needed else 0
        for name in runs:
            if name not in chunks:
                made = []
                for first, size in runs[name]:
                    made.append(Chunk(first, size, at))
                    at += aligned(size)
                chunks[name] = made
        likes = {
            name: torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            for name, value in found.items()
        }
        return {name: DiskState(like, self.file, chunks[name]) for name, like in likes.items()}

    def _runs(self, p: Tensor, value: Tensor) -> list[tuple[int, int]]:
        """Return first byte and bytes of each chunk: those of a piece, but for one of more than CHUNK."""
        per = elements_per(p, value) if self.length else 0
        run = -(-self.length // per) * value.itemsize if per else value.nbytes
        runs = [(first, min(run, value.nbytes - first)) for first in range(0, value.nbytes, run)]
        return [
            (first + more, min(CHUNK, size - more)) for first, size in runs for more in range(0, size, CHUNK)
        ]

    def names(self, states: dict[str, Any]) -> list[str]:
        """Return the names of the states that are here."""
        return [name for name, value in self._at.items() if states.get(name) is value]

    def wait(self) -> None:
        """A step ends when all is written."""


def _length(p: Tensor, states: dict[str, Any]) -> int:
    """Return the elements of p in each of its turns, a multiple of GRAIN; 0 where it is stepped whole."""
    values = [value for name, value in states.items() if name != "step" and isinstance(value, Tensor)]
    if not is_plain(p) or FACTORS[0] in states or not all(elements_per(p, value) for value in values):
        return 0
    total = p.nbytes + sum(value.nbytes for value in values)  # with a gradient like p
    length = max(DISK_TURN * p.numel() // total // GRAIN, 1) * GRAIN
    return length if length < p.numel() else 0


class StateTrip:
    """A state's way to the device and back."""

    def __init__(self, states: dict[str, Any], name: str) -> None:
        self._states, self._name = states, name
        self.like = states[name]

    def arrive(self, there: Tensor, copy: CopyIn | None) -> None:
        if copy is not None:
            copy.join(there)
        self._states[self._name] = there

    def leave(self) -> int:
        there = self._states[self._name]
        if there is self.like:  # it has not arrived
            return 0
        self._states[self._name] = self.like
        return self.send(there)

    def send(self, there: Tensor) -> int:
        """Begin to copy it out; return the ticket."""
        raise NotImplementedError


class DiskTrip(StateTrip):
    """A state's way from the disk to the device and back."""

    like: DiskState
    passage: Passage | None = None  # until the step knows its turns

    def begin(self, there: Tensor, after: int) -> CopyIn | None:
        assert self.passage is not None
        return self.passage.come(self.like, there, after)

    def send(self, there: Tensor) -> int:
        assert self.passage is not None
        return self.passage.go(self.like, there)


def passages_of(device: torch.device, trips: Iterable[Traveller]) -> list[Passage]:
    """Return the passages of a step's turns on one device, a file each."""
    by_file: dict[StateFile, list[DiskTrip]] = {}
    for trip in trips:
        if isinstance(trip, DiskTrip):
            by_file.setdefault(trip.like.file, []).append(trip)
    passages = []
    for file, found in by_file.items():
        chunks = [chunk for trip in found for chunk in trip.like.chunks]
        passage = Passage(file, device, chunks, sum(aligned(chunk.nbytes) for chunk in chunks))
        passages.append(passage)
        for trip in found:
            trip.passage = passage
    return passages
