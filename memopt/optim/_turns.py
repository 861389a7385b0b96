"""A step in turns: what lives in the host's memory, gradients and states, comes to the device for a few parameters at a
time, and states go back.

Two turns have room on the device, taken before the first begins. While one's parameters are updated, the next turn's
tensors come, and the states of the turn before leave; the host waits for none of this. Copies are memopt._C's, a line
each way (csrc/transfer/copies.h):

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
from memopt._offload.pinned_memory import CopyIn, aligned, dense_bytes, index_of, pinned_tensor
from memopt.optim._offloaded_gradients import HostGradient

FOREVER = 1e8  # seconds
TURN = 256 << 20  # bytes that a turn has at most, but for a single parameter's


class Traveller(Protocol):
    """A tensor that lives on the host, and is on the device for one turn."""

    @property
    def like(self) -> Tensor:
        """One of its size, strides, type and bytes."""

    def begin(self, there: Tensor, after: int) -> CopyIn:
        """Begin to copy it there, behind the copy out of that ticket."""

    def arrive(self, there: Tensor, copy: CopyIn) -> None:
        """Put it where the update finds it."""

    def leave(self) -> int:
        """Put back what stands for it; return the ticket of its copy out, 0 for none."""


class GradientTrip:
    """A gradient's way into .grad and out of it."""

    def __init__(self, p: Tensor, gradient: HostGradient) -> None:
        self._p, self.like = p, gradient

    def begin(self, there: Tensor, after: int) -> CopyIn:
        return self.like.begin_return(there, after)

    def arrive(self, there: Tensor, copy: CopyIn) -> None:
        self.like.end_return(there, copy)
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

    def trips(self, states: dict[str, Any]) -> list[StateTrip]:
        return [
            StateTrip(self, states, name) for name, value in self._at.items() if states.get(name) is value
        ]

    def wait(self) -> None:
        """Wait, on the host, until the states are what the last step made of them."""
        if self.copied:
            _C.copy_wait(self._device, self.copied, FOREVER)
            self.copied = 0


class StateTrip:
    """A state's way to the device and back."""

    def __init__(self, home: HostStates, states: dict[str, Any], name: str) -> None:
        self._home, self._states, self._name = home, states, name
        self.like: Tensor = states[name]

    def begin(self, there: Tensor, after: int) -> CopyIn:
        owner = torch.cuda.current_stream(there.device)
        return CopyIn(owner, _C.copy_in(_bytes(self.like), _bytes(there), after, owner.cuda_stream))

    def arrive(self, there: Tensor, copy: CopyIn) -> None:
        copy.join(there)
        self._states[self._name] = there

    def leave(self) -> int:
        there = self._states[self._name]
        if there is self.like:  # it has not arrived
            return 0
        self._states[self._name] = self.like
        self._home.copied = _C.copy_out(_bytes(there), _bytes(self.like))
        return self._home.copied


class Load(NamedTuple):
    """One parameter's share of a turn: what comes for its update, and a gradient that is there already."""

    p: Tensor
    grad: Tensor | None
    trips: Sequence[Traveller]

    @property
    def nbytes(self) -> int:
        return sum(aligned(trip.like.nbytes) for trip in self.trips)


class Turns:
    """The turns of a step on one device. Takes their memory."""

    def __init__(self, device: torch.device, loads: Sequence[Load]) -> None:
        self._device = device
        self._turns: list[list[Load]] = []
        most, left = min(TURN, max(load.nbytes for load in loads)), 0
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

    def run(self) -> Iterator[None]:
        """Yield once a turn, with what it needs on the device."""
        coming, here = self._begin(0), []
        try:
            for k, turn in enumerate(self._turns):
                here, coming = coming, self._begin(k + 1)
                for trip, there, copy in here:
                    trip.arrive(there, copy)
                for load in turn:
                    if load.grad is not None:
                        load.p.grad = load.grad
                yield
                self._leave(k, here)
                for load in turn:
                    load.p.grad = None
                here = []
        finally:
            self._leave(k, here)  # of a turn that failed
            for _, there, copy in coming:  # what nobody waits for would write into what is another's
                copy.join(there)
            self.end()

    def end(self) -> None:
        """Have the current stream go on behind all copies out: the rooms are others', the states the next step's."""
        for ticket in self._copied:
            _C.copy_await(self._device.index, ticket)

    def _leave(self, k: int, here: list[tuple[Traveller, Tensor, CopyIn]]) -> None:
        for trip, _, _ in here:
            self._copied[k % 2] = trip.leave() or self._copied[k % 2]

    def _begin(self, k: int) -> list[tuple[Traveller, Tensor, CopyIn]]:
        """Begin a turn's copies, if there is such a turn."""
        offset, coming = 0, []
        storage = self._rooms[k % 2].untyped_storage()
        for load in self._turns[k] if k < len(self._turns) else ():
            for trip in load.trips:
                there = torch.empty(0, dtype=trip.like.dtype, device=self._device)
                there.set_(storage, offset // there.itemsize, trip.like.size(), trip.like.stride())
                coming.append((trip, there, trip.begin(there, self._copied[k % 2])))
                offset += aligned(trip.like.nbytes)
        return coming


def in_turns(
    parameters: Iterable[Tensor], states: Mapping[Tensor, Any], homes: Mapping[int, HostStates]
) -> Iterator[None]:
    """Yield once a turn, with gradients and states of some parameters on the device, and no gradient of any other.

    homes: by id(parameter). What stands for gradients is back in .grad at the end.
    """
    had = [(p, p.grad) for p in parameters if p.grad is not None]
    there: list[tuple[Tensor, Tensor]] = []
    loads: dict[torch.device, list[Load]] = {}
    for p, grad in had:
        home = homes.get(id(p))
        trips: list[Traveller] = [] if home is None else [*home.trips(states[p])]
        if isinstance(grad, HostGradient):
            loads.setdefault(p.device, []).append(Load(p, None, [GradientTrip(p, grad), *trips]))
        elif trips:
            loads.setdefault(p.device, []).append(Load(p, grad, trips))
        else:
            there.append((p, grad))
    try:
        for p, _ in had:
            p.grad = None
        turns = [Turns(device, found) for device, found in loads.items()]
        if there:
            for p, grad in there:
                p.grad = grad
            yield
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
