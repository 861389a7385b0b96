"""Tensors of a CUDA device kept in pinned host memory until they are wanted again.

One stream a device carries all copies, both ways, in the order in which they were asked for: so host memory may be
used again without waiting, and a tensor comes back after it has gone. Between that stream and the computation:

    keep     the copy begins once all is done that the present stream was given before: the tensor is whole
    finish   what that stream, and the present one, are given afterwards comes after the copies: it may overwrite the
             tensors, or be given their memory
    fetch    the copy begins once all is done that the present stream was given before: what had the memory last
    back     what the present stream is given afterwards comes after the copy

The host waits for none of it."""

from __future__ import annotations

import sys

import torch


class Offload:
    """Copies of one forward run."""

    def __init__(self) -> None:
        self._users: set[torch.cuda.Stream] = set()
        self._copied: dict[torch.device, torch.cuda.Event] = {}  # the last copy

    def keep(
        self, tensor: torch.Tensor, host: torch.Tensor | None = None, *, held: bool = False
    ) -> OnHost | None:
        """A copy of the tensor on the host; None where there is nothing to gain: it is not on a CUDA device, or is not
        plain memory.

        host: pinned memory of the tensor's form to have it in. held: the caller holds the tensor until finish(), after
        which its memory is free at once; else it may go at any time, and its memory as soon as the copy is made."""
        if type(tensor) is not torch.Tensor or not tensor.is_cuda or tensor.layout is not torch.strided:
            return None
        user, side = torch.cuda.current_stream(tensor.device), stream_of(tensor.device)
        if host is None:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        side.wait_stream(user)
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
            self._copied[tensor.device] = side.record_event()
        if not held:
            tensor.record_stream(side)
        self._users.add(user)
        return OnHost(host, tensor.device)

    def finish(self) -> None:
        """What is queued from here on may overwrite what was kept."""
        for device, copied in self._copied.items():
            for user in {*self._users, torch.cuda.current_stream(device)}:
                if user.device == device:
                    user.wait_event(copied)
        self._users.clear()
        self._copied.clear()


class OnHost:
    """A tensor on the host, or on its way there; and once it was fetched, on the device again."""

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.host, self.device = host, device
        self._arrival: Arrival | None = None

    def fetch(self) -> None:
        """The copy back begins; the memory for it is taken now."""
        if self._arrival is None:
            self._arrival = Arrival(self.host, self.device)

    def back(self) -> torch.Tensor:
        """The tensor, for the present stream."""
        self.fetch()
        assert self._arrival is not None
        return self._arrival.tensor()


class Arrival:
    """A tensor on its way back to the device."""

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self._tensor = torch.empty_like(host, device=device)
        self._home = torch.cuda.current_stream(device)  # whose the memory is
        side = stream_of(device)
        side.wait_stream(self._home)
        with torch.cuda.stream(side):
            self._tensor.copy_(host, non_blocking=True)
            self._copied = side.record_event()
        self._awaited = False

    def tensor(self) -> torch.Tensor:
        user = torch.cuda.current_stream(self._tensor.device)
        user.wait_event(self._copied)
        if user == self._home:
            self._awaited = True
        else:
            self._tensor.record_stream(user)
        return self._tensor

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and not sys.is_finalizing():
            self._home.wait_event(self._copied)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
