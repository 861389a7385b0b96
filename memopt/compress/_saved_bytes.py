"""A model's persistent tensors, and the bytes that torch.save() writes of them."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def standing(model: nn.Module) -> list[torch.Tensor]:
    """A model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


class _Counter(io.RawIOBase):
    """A file that nothing is kept of but its length."""

    def __init__(self) -> None:
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        self.nbytes += size
        return size


def disk_bytes(state: object) -> int:
    """The length of the file that torch.save(state, file) makes, byte for byte: it is written in full, to nowhere.

    Given a path instead of an open file, torch.save() names its records after the file, a few bytes a tensor more or
    less.
    """
    counter = _Counter()
    with _without_checksums():
        torch.save(state, counter)
    return counter.nbytes


_lock = threading.Lock()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Leave out checksums: they are most of the time that it takes to write a model, and nobody will read these.

    A file that another thread writes meanwhile has none either, and is read all the same.
    """
    with _lock:
        wanted = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(wanted)
