"""Where stages may offload to, and how fast that is."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import NamedTuple

import torch

from memopt.checkpointing.chain_offload import OnDiskPlace, Pinned, Place
from memopt.checkpointing.disk import DiskFile
from memopt.checkpointing.offload import Offload

NBYTES = 1 << 24  # of a trial copy: a few milliseconds on anything that is worth it
TRIALS = 3


class Bandwidth(NamedTuple):
    """Bytes a second from the device and back to it. beside: copies are carried out beside the computation."""

    out: float
    back: float
    beside: bool

    def forward(self, seconds: float, nbytes: int) -> float:
        return self._with(seconds, nbytes / self.out)

    def backward(self, seconds: float, nbytes: int) -> float:
        return self._with(seconds, nbytes / self.back)

    def _with(self, seconds: float, copies: float) -> float:
        return max(seconds, copies) if self.beside else seconds + copies


def destination(offload: str | os.PathLike[str] | None, device: torch.device) -> str | None:
    """`offload` as ChainOffload takes it. ValueError or OSError, with what to give instead, where it is none for
    stages on this device."""
    if offload is None:
        return None
    to = os.fspath(offload)
    if to == "cpu":
        if device.type != "cuda":
            raise ValueError(
                f'offload="cpu" is for a model on a CUDA device, and this one is on {device.type}: copies in the '
                "memory where the tensors are already would gain nothing; give the path of a directory on a disk"
            )
        return to
    if device.type != "cpu":
        raise ValueError(
            f"offload={to!r} is a path, and the model is on {device.type}: only what is on the CPU is written to a "
            'disk; give "cpu"'
        )
    DiskFile(to, 0)  # that it can be written to is better known now
    return os.path.abspath(to)


def bandwidth(to: str, device: torch.device) -> Bandwidth:
    """Measured with copies of 16 MiB, which live for as long as that takes, once in a process for each device or disk.
    On a disk both ways go through the system's cache of files, as the stages' own do."""
    return _of_device(device) if to == "cpu" else _of_disk(to, os.stat(to).st_dev)


@cache
def _of_device(device: torch.device) -> Bandwidth:
    return _measured(Pinned(NBYTES), device, beside=True)


@cache
def _of_disk(path: str, disk: int) -> Bandwidth:
    del disk  # what may be mounted there changes
    return _measured(OnDiskPlace(path, NBYTES), torch.device("cpu"), beside=False)


def _measured(place: Place, device: torch.device, *, beside: bool) -> Bandwidth:
    flat = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(TRIALS):
        copies = Offload()
        times = [_now(device)]
        kept = place.keep(flat, 0, copies)
        copies.finish()
        times.append(_now(device))
        kept.back()
        times.append(_now(device))
        seconds.append((times[1] - times[0], times[2] - times[1]))
    out, back = (NBYTES / max(min(column), 1e-9) for column in zip(*seconds, strict=True))
    return Bandwidth(out, back, beside)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
