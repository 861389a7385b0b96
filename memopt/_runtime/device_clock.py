"""The clock by which work on a device is timed: this machine's, or one that an estimate of another card puts there."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceClock:
    """This machine's clock.

    Attributes:
        repeats: Times that work is done to be timed, of which the least is taken.
        exact: The same work takes the same time: once is enough.
    """

    repeats: int = 3
    exact: bool = False

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which moments are taken."""
        return nullcontext()

    def now(self, device: torch.device) -> float:
        """Return the present moment, once the device has done what it was given."""
        synchronize(device)
        return time.perf_counter()

    def between(self, begun: float, ended: float) -> float:
        """Return the seconds between two moments, once the context that they were taken in has ended."""
        return ended - begun


clock = DeviceClock()


def use(other: DeviceClock) -> None:
    """Take times by another clock from now on."""
    global clock
    clock = other


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize(device)
