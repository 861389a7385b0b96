"""Tensors between a CUDA device and pinned host memory, beside the computation, in an order that streams alone keep:
the host waits for nothing. The copies are memopt._C's (csrc/transfer/copies.h), a stream each way.

    host = pinned_tensor(device, nbytes)
    ticket = _C.copy_out(tensor, host)           begins once `tensor` is whole
    _C.copy_await(device.index, ticket)          from here on the present stream may overwrite it or be given its memory
    arrival = Arrival(host, device, ticket)      the way back begins, behind the copy out
    arrival.tensor()                             for the present stream"""

from __future__ import annotations

import sys

import torch

from memopt import _C


def pinned_tensor(device: torch.device, nbytes: int) -> torch.Tensor:
    """Page-locked bytes (torch.uint8), exactly so many, not rounded as torch's own are. Taking them takes long, and
    giving them back waits for the device: they are to be kept."""
    return torch.frombuffer(_C.PinnedMemory(index_of(device), nbytes), dtype=torch.uint8)


def index_of(device: torch.device) -> int:
    return int(torch.cuda.current_device()) if device.index is None else device.index


class Landing:
    """The copy that fills new memory of a device. home: the stream that the memory is of."""

    __slots__ = ("home", "ticket")

    def __init__(self, home: torch.cuda.Stream, ticket: int) -> None:
        self.home, self.ticket = home, ticket

    def join(self, tensor: torch.Tensor) -> bool:
        """What the present stream is given from now on may use the tensor that is filled. Whether that is home."""
        user = torch.cuda.current_stream(tensor.device)
        _C.copy_await(tensor.device.index, self.ticket, user.cuda_stream)
        if user == self.home:
            return True
        tensor.record_stream(user)
        return False


class Arrival:
    """Bytes on their way from the host to new memory of a device.

    host: pinned, torch.uint8, kept as it is until the copy is over. after: the ticket of the copy that filled it."""

    __slots__ = ("_awaited", "_tensor", "landing")

    def __init__(self, host: torch.Tensor, device: torch.device, after: int = 0) -> None:
        self._awaited = True  # until there is something to wait for
        self._tensor = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        home = torch.cuda.current_stream(device)
        self.landing = Landing(home, _C.copy_in(host, self._tensor, after))
        self._awaited = False

    def tensor(self) -> torch.Tensor:
        """The bytes, for what the present stream is given from now on."""
        self._awaited |= self.landing.join(self._tensor)
        return self._tensor

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and not sys.is_finalizing():
            _C.copy_await(self._tensor.device.index, self.landing.ticket, self.landing.home.cuda_stream)
