"""A step in turns: what lives in the host's memory or on a disk, gradients and states, comes to the device for a few
parameters at a time, and states go back. A parameter with more than a turn's bytes is stepped in pieces.

Two turns have room on the device, taken before the first begins. While one's parameters are updated, the next turn's
tensors come, and the states of the turn before leave; the host waits for none of this, but for a disk
(_disk_states.py). Copies are memopt._C's, a line each way (csrc/transfer/copies.h):

    copy in     begins once the turn that had its room last has been updated, and behind that turn's copies out
    copy out    begins once the turn has been updated
    the end     comes behind all copies out
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memopt import _C
from memopt._offload.pinned_memory import FOREVER, CopyIn, aligned, dense_bytes, index_of, pinned_tensor
from memopt.optim._disk_states import DISK_TURN, DiskState, DiskStates, DiskTrip, StateTrip, passages_of
from memopt.optim._offloaded_gradients import HostGradient
from memopt.optim._state_layout import FACTORS, GRAIN, elements_per, is_plain

TURN = 256 << 20  # bytes that a turn has at most, but for a parameter that cannot be cut


class Traveller(Protocol):
    """A tensor that lives on the host or on a disk, and is on the device for one turn."""

    @property
    def like(self) -> Tensor:
        """One of its size, strides, type and bytes."""

    def begin(self, there: Tensor, after: int) -> CopyIn | None:
        """Begin to copy it there, behind the copy out of that ticket; None where the copy is over."""

    def arrive(self, there: Tensor, copy: Any) -> None:
        """Put it where the update finds it."""

    def leave(self) -> int:
        """Put back what stands for it; return the ticket of its copy out, 0 for none."""


class GradientTrip:
    """A gradient's way into .grad and out of it; of a piece of a parameter, that of its elements."""

    def __init__(self, p: Tensor, gradient: HostGradient, first: int | None = None) -> None:
        self._p, self._gradient, self._first = p, gradient, first or 0
        self.like: Tensor = gradient
        if first is not None:
            self.like = torch.empty(p.numel(), dtype=gradient.dtype, device="meta")

    def begin(self, there: Tensor, after: int) -> CopyIn:
        return self._gradient.begin_return(there, after, self._first)

    def arrive(self, there: Tensor, copy: CopyIn) -> None:
        self._gradient.end_return(there, copy)
        self._p.grad = there

    def leave(self) -> int:
        self._p.grad = None
        return 0


class HostStates:
    """A parameter's states in pinned memory, where the optimizer's dict has them between its steps."""

    def __init__(self) -> None:
        self._at: dict[str, Tensor] = {}
        self._device = -1
        self.copied = 0  # the last copy out of one of them

    def take(self, states: dict[str, Any], device: torch.device) -> None:
        """Move the states that are not here yet to the host, but for the count of steps. Waits for them."""
        kept = {name: value for name, value in self._at.items() if states.get(name) is value}
        if len(kept) < len(self._at):
            self.wait()  # copies may be on their way into what goes
            self._at = kept
        found = {
            name: value
            for name, value in states.items()
            if name != "step" and isinstance(value, Tensor) and name not in kept
        }
        nbytes = sum(aligned(value.nbytes) for value in found.values())
        if not nbytes:
            return
        try:
            flat = pinned_tensor(device, nbytes)
        except MemoryError as error:
            raise MemoryError(
                f"the host cannot lock {nbytes} bytes of memory for a parameter's optimizer states: raise `ulimit -l` "
                "or the memory limit of the container, or leave out offload_states=True"
            ) from error
        self._device, offset = index_of(device), 0
        for name, value in found.items():
            home = torch.empty(0, dtype=value.dtype)
            home.set_(flat.untyped_storage(), offset // value.itemsize, value.size(), value.stride())
            offset += aligned(value.nbytes)
            states[name] = self._at[name] = home
            if value.is_cuda:
                self.copied = _C.copy_out(_bytes(value), _bytes(home))
            else:
                home.copy_(value)
        self.wait()  # until then nothing else may have the memory of what is copied

    def names(self, states: dict[str, Any]) -> list[str]:
        """Return the names of the states that are here."""
        return [name for name, value in self._at.items() if states.get(name) is value]

    def wait(self) -> None:
        """Wait, on the host, until the states are what the last step made of them."""
        if self.copied:
            _C.copy_wait(self._device, self.copied, FOREVER)
            self.copied = 0


Home = HostStates | DiskStates


class HostTrip(StateTrip):
    """A state's way from the host to the device and back."""

    def __init__(self, home: HostStates, states: dict[str, Any], name: str) -> None:
        super().__init__(states, name)
        self._home = home

    def begin(self, there: Tensor, after: int) -> CopyIn:
        owner = torch.cuda.current_stream(there.device)
        return CopyIn(owner, _C.copy_in(_bytes(self.like), _bytes(there), after, owner.cuda_stream))

    def send(self, there: Tensor) -> int:
        self._home.copied = _C.copy_out(_bytes(there), _bytes(self.like))
        return self._home.copied


class Piece(NamedTuple):
    """A run of a parameter's elements in memory, as a parameter of its own, which is a row."""

    of: Tensor
    p: Tensor
    states: dict[str, Any]
    first_index: int

    @property
    def is_last(self) -> bool:
        return bool(self.first_index + self.p.numel() == self.of.numel())


class Load(NamedTuple):
    """One parameter's, or piece's, share of a turn: what comes for its update, and a gradient that is there already."""

    p: Tensor
    grad: Tensor | None
    trips: Sequence[Traveller]
    piece: Piece | None = None

    @property
    def nbytes(self) -> int:
        return sum(aligned(trip.like.nbytes) for trip in self.trips)


class Turns:
    """The turns of a step on one device. Takes their memory."""

    def __init__(self, device: torch.device, loads: Sequence[Load]) -> None:
        self._device = device
        self._turns: list[list[Load]] = []
        self._passages = passages_of(device, (trip for load in loads for trip in load.trips))
        most, left = DISK_TURN if self._passages else TURN, 0
        most = min(most, max(load.nbytes for load in loads))
        for load in loads:
            if load.nbytes > left:
                self._turns.append([])
                left = max(most, load.nbytes)
            self._turns[-1].append(load)
            left -= load.nbytes
        sizes = [sum(load.nbytes for load in turn) for turn in self._turns]
        self._rooms = [
            torch.empty(max(sizes[k::2], default=0), dtype=torch.uint8, device=device) for k in (0, 1)
        ]
        self._copied = [0, 0]  # of each room the last copy out

    def run(self) -> Iterator[Piece | None]:
        """Yield each piece, and None once a turn for all its whole parameters, with what they need on the device."""
        k = 0
        coming: list[tuple[Traveller, Tensor, CopyIn | None]] = []
        here: list[tuple[Traveller, Tensor, CopyIn | None]] = []
        try:
            for passage in self._passages:
                passage.ahead()
            self._begin(0, coming)
            for k, turn in enumerate(self._turns):
                here, coming = coming, []
                self._begin(k + 1, coming)
                for trip, there, copy in here:
                    trip.arrive(there, copy)
                for load in turn:
                    if load.grad is not None:
                        load.p.grad = load.grad
                yield from (load.piece for load in turn if load.piece is not None)
                if any(load.piece is None for load in turn):
                    yield None
                self._leave(k, here)
                for load in turn:
                    load.p.grad = None
                here = []
        finally:
            self._leave(k, here)  # of a turn that failed
            for _, there, copy in (
                *here,
                *coming,
            ):  # what nobody waits for would write into what is another's
                if copy is not None:
                    copy.join(there)
            self.end()
            for passage in self._passages:
                passage.finish()

    def end(self) -> None:
        """Have the current stream go on behind all copies out: the rooms are others', the states the next step's."""
        for ticket in filter(None, self._copied):
            _C.copy_await(self._device.index, ticket)

    def _leave(self, k: int, here: list[tuple[Traveller, Tensor, CopyIn | None]]) -> None:
        for trip, _, _ in here:
            self._copied[k % 2] = trip.leave() or self._copied[k % 2]

    def _begin(self, k: int, coming: list[tuple[Traveller, Tensor, CopyIn | None]]) -> None:
        """Begin a turn's copies, if there is such a turn."""
        offset = 0
        storage = self._rooms[k % 2].untyped_storage()
        for load in self._turns[k] if k < len(self._turns) else ():
            for trip in load.trips:
                there = torch.empty(0, dtype=trip.like.dtype, device=self._device)
                there.set_(storage, offset // there.itemsize, trip.like.size(), trip.like.stride())
                coming.append((trip, there, trip.begin(there, self._copied[k % 2])))
                offset += aligned(trip.like.nbytes)


def _loads(p: Tensor, states: dict[str, Any], home: Home | None, cuts: bool) -> list[Load]:
    """Return what comes from the host or a disk for p's step, one load or its pieces; none if all is there already."""
    grad, names = p.grad, [] if home is None else home.names(states)
    assert grad is not None

    def load(of: Tensor, states: dict[str, Any], piece: Piece | None) -> Load:
        trips: list[Traveller] = [
            HostTrip(home, states, name) if isinstance(home, HostStates) else DiskTrip(states, name)
            for name in names
        ]
        if isinstance(grad, HostGradient):
            first = None if piece is None else piece.first_index
            return Load(of, None, [GradientTrip(of, grad, first), *trips], piece)
        return Load(of, grad if piece is None else of.grad, trips, piece)

    whole = load(p, states, None)
    if isinstance(home, DiskStates) and names:
        elements = home.length
    else:
        elements = TURN * p.numel() // whole.nbytes if whole.nbytes > TURN else 0
    if cuts and elements and (cut := _pieces(p, grad, states, elements)):
        return [load(piece.p, piece.states, piece) for piece in cut]
    return [whole] if whole.trips else []


def _pieces(p: Tensor, grad: Tensor, states: dict[str, Any], elements: int) -> list[Piece]:
    """Cut a parameter into pieces of at most so many elements, or of GRAIN; none where it cannot be."""
    pers = {name: elements_per(p, value) for name, value in states.items() if name != "step"}
    other = grad.shape != p.shape or grad.stride() != p.stride() or not is_plain(p)
    if other or 0 in pers.values() or FACTORS[0] in states:  # averages are of all elements
        return []
    length, count = max(elements // GRAIN, 1) * GRAIN, p.numel()
    pieces = []
    for first in range(0, count, length):
        end = min(first + length, count)
        piece = Piece(p, _row(p)[first:end], {}, first)
        if grad.dtype is not p.dtype:
            piece.p.grad_dtype = grad.dtype  # type: ignore[attr-defined]  # as p's is
        if not isinstance(grad, HostGradient):
            piece.p.grad = _row(grad)[first:end]
        for name, per in pers.items():
            piece.states[name] = _row_of(states[name], first // per, -(-end // per))
        if "step" in states:  # each piece's update counts the step; the last one's is the parameter's
            piece.states["step"] = states["step"] if piece.is_last else states["step"].clone()
        pieces.append(piece)
    return pieces


def _row_of(state: Tensor, first: int, last: int) -> Tensor:
    return state.row(first, last) if isinstance(state, DiskState) else _row(state)[first:last]


def _row(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def in_turns(
    parameters: Iterable[Tensor], states: Mapping[Tensor, Any], homes: Mapping[int, Home], cuts: bool
) -> Iterator[Piece | None]:
    """Yield each piece of a parameter, and None for some whole ones, with their gradients and states on the device, and
    no gradient of any other.

    homes: by id(parameter). cuts: whether a parameter may be stepped in pieces. What stands for gradients is back in
    .grad at the end.
    """
    had = [(p, p.grad) for p in parameters if p.grad is not None]
    there: list[tuple[Tensor, Tensor]] = []
    loads: dict[torch.device, list[Load]] = {}
    for p, grad in had:
        found = _loads(p, states.get(p) or {}, homes.get(id(p)), cuts)
        loads.setdefault(p.device, []).extend(found)
        if not found:
            there.append((p, grad))
    try:
        for p, _ in had:
            p.grad = None
        turns = [Turns(device, found) for device, found in loads.items() if found]
        if there:
            for p, grad in there:
                p.grad = grad
            yield None
            for p, _ in there:
                p.grad = None
        for one in turns:
            yield from one.run()
    finally:
        for p, grad in had:
            p.grad = grad


def _bytes(tensor: Tensor) -> Tensor:
    flat = dense_bytes(tensor)
    assert flat is not None  # states are dense
    return flat
