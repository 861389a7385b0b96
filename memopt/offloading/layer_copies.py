"""Copies of parameters to the device, and of gradients from it, beside the computation: a stream each way, and their
order by events alone.

Inward. Memory for a copy is taken from the present stream, which had it last; so the copy begins once all is done that
this stream was given before, and what the stream is given after `tensor()` comes after the copy. Freed, the memory is
the present stream's at once: it has been given all that reads it.
Outward. The copy begins once all is done that the present stream was given before: the gradient is whole. It is held
until the present stream waits for the copy, which is when a layer's worth is on its way; so of gradients there are two
layers' at most, those that leave and those that are being made, and the copy had a layer's time to be made in.

The host waits in three places: `Departure.wait`, of the thread that is about to read the gradient; `Inward.settle`,
behind which the program may write to the parameters; and nowhere else."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

import torch

from memopt.offloading.home_memory import LockedMemory


class Inward:
    """The way to the device. copied: bytes, so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.copied = 0
        self._last: torch.cuda.Event | None = None

    def fetch(self, hosts: Sequence[torch.Tensor]) -> list[DeviceCopy]:
        """Copies that have begun. All memory is taken before any does; so an error leaves none."""
        tensors = [torch.empty_like(host, device=self.device, requires_grad=False) for host in hosts]
        home = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(home)
        copied = torch.cuda.Event(blocking=True)
        try:
            with torch.cuda.stream(self.stream):
                for tensor, host in zip(tensors, hosts, strict=True):
                    tensor.copy_(host.detach(), non_blocking=True)
                    self.copied += host.nbytes
        except BaseException:
            self._begun(copied)
            home.wait_event(copied)  # the tensors' memory goes back to it
            raise
        self._begun(copied)
        return [DeviceCopy(host, tensor, home, copied) for host, tensor in zip(hosts, tensors, strict=True)]

    def _begun(self, copied: torch.cuda.Event) -> None:
        copied.record(self.stream)
        self._last = copied

    def settle(self) -> None:
        """The host waits for the copies that have begun: what they read may change."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


class DeviceCopy:
    """A parameter's value on the device, or on its way there."""

    __slots__ = ("_awaited", "_copied", "_home", "_tensor", "host", "pointer", "version")

    def __init__(
        self, host: torch.Tensor, tensor: torch.Tensor, home: torch.cuda.Stream, copied: torch.cuda.Event
    ) -> None:
        self.host, self._tensor, self._home, self._copied = host, tensor, home, copied
        self.version, self.pointer = host._version, host.data_ptr()
        self._awaited = False

    @property
    def nbytes(self) -> int:
        return int(self._tensor.nbytes)

    @property
    def storage(self) -> int:
        return int(self._tensor.untyped_storage()._cdata)

    def holds(self, host: torch.Tensor) -> bool:
        """Whether that is what was copied, and has not changed since."""
        return host is self.host and host._version == self.version and host.data_ptr() == self.pointer

    def tensor(self) -> torch.Tensor:
        """The copy, for the present stream; not part of any graph."""
        user = torch.cuda.current_stream(self._tensor.device)
        user.wait_event(self._copied)
        if user == self._home:
            self._awaited = True
        else:
            self._tensor.record_stream(user)
        return self._tensor.data  # with a version counter of its own

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and not sys.is_finalizing():
            self._home.wait_event(self._copied)


class Outward:
    """The way from the device. most: bytes of gradients that are kept for their copies' sake, the last at least.
    copied: bytes, so far."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.device, self.most = device, most
        self.stream = torch.cuda.Stream(device)
        self.memory = LockedMemory(device)
        self.copied = 0
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Stream, torch.cuda.Event]] = deque()
        self._held = 0

    def send(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """-> (the gradient on the host, once the event has come)."""
        host = self.memory.lend(gradient)
        if host.stride() != gradient.stride():
            gradient = gradient.contiguous()  # a copy of gaps would be made piece by piece
        home = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(home)
        copied = torch.cuda.Event(blocking=True)
        try:
            with torch.cuda.stream(self.stream):
                host.copy_(gradient, non_blocking=True)
        finally:
            copied.record(self.stream)
            self._leaving.append((gradient, home, copied))
            self._held += gradient.nbytes
        self.copied += gradient.nbytes
        while self._held > self.most and len(self._leaving) > 1:
            self._release()
        return host, copied

    def finish(self) -> None:
        """All gradients' memory is the computation's again; the host need not wait."""
        while self._leaving:
            self._release()

    def _release(self) -> None:
        gradient, home, copied = self._leaving.popleft()
        self._held -= gradient.nbytes
        home.wait_event(copied)
