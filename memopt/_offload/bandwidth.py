"""Places that stages may offload to, and how fast they are."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import NamedTuple

import torch

from memopt._offload.disk_space import DiskSpace
from memopt._offload.schedule_sets import ScheduleOffload, disk_errors

NBYTES = 1 << 24  # of a trial copy: a few milliseconds on anything that is worth it
TRIALS = 3


class Bandwidth(NamedTuple):
    """Bytes a second from the device and back to it, beside the computation."""

    out: float
    back: float

    def forward(self, seconds: float, nbytes: int) -> float:
        return max(seconds, nbytes / self.out)

    def backward(self, seconds: float, nbytes: int) -> float:
        return max(seconds, nbytes / self.back)


def destination(to: str | os.PathLike[str] | None, device: torch.device) -> str | None:
    """`to` as ScheduleOffload takes it. ValueError or OSError, with what to give instead, where it is none for stages
    on this device."""
    if to is None:
        return None
    where = os.fspath(to)
    if where == "cpu":
        if device.type != "cuda":
            raise ValueError(
                f'to="cpu" is for a model on a CUDA device, and this one is on {device.type}: copies in the '
                "memory where the tensors are already would gain nothing; give the path of a directory on a disk"
            )
        return where
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"to={where!r}: what is on {device.type} cannot be offloaded, only what is on a CUDA device or the CPU"
        )
    with disk_errors(where):
        DiskSpace(where)  # that it can be written to is better known now
    return os.path.abspath(where)


def bandwidth(to: str, device: torch.device) -> Bandwidth:
    """Measured with copies of 16 MiB, which live for as long as that takes, once in a process for each device and
    disk."""
    return _measured(to, device, 0 if to == "cpu" else os.stat(to).st_dev)


@cache
def _measured(to: str, device: torch.device, disk: int) -> Bandwidth:
    del disk  # what may be mounted there changes
    offload = ScheduleOffload(to, {0: NBYTES})
    flat = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(TRIALS):
        times = [_now(device)]
        transfer = offload.transfer(flat)
        transfer.settle()
        offload.written()
        times.append(_now(device))
        transfer.back()
        times.append(_now(device))
        seconds.append((times[1] - times[0], times[2] - times[1]))
    return Bandwidth(*(NBYTES / max(min(column), 1e-9) for column in zip(*seconds, strict=True)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
