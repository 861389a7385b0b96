"""One storage's way off the device and back, beside the computation.

    Departure(flat, …)   the copy out begins
    settle()             what the present stream is given from here on may have the memory: the caller lets it go
    fetch()              the way back begins
    back()               the bytes again, for the present stream
    landed()             nobody needs them for now: the next fetch() brings them anew

flat: the whole storage, as torch.uint8."""

from __future__ import annotations

from typing import Protocol

import torch

from memopt import _C
from memopt.offloading.host_memory import Room
from memopt.offloading.transfers import Arrival


class Departure(Protocol):
    def settle(self) -> None: ...
    def fetch(self) -> None: ...
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

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._arrival is not None
        return self._arrival.tensor()

    def landed(self) -> None:
        self._arrival = None
