"""Bytes of tensors on a disk: written when they are kept, read when they are wanted, in files that have no name, so
that nothing is left however the process ends."""

from __future__ import annotations

import ctypes
import os
import tempfile

import torch


def refused(path: str, error: OSError) -> OSError:
    """The error with what to do about it."""
    return type(error)(
        error.errno,
        f"{error.strerror}: the disk to which stages offload what they saved; give auto_checkpoint's offload= a "
        "directory that can be written to and has room, or a larger memory_budget",
        path,
    )


class DiskFile:
    """nbytes of room in the directory `path`. Raises OSError, naming it, where there is none."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        try:
            self.file = tempfile.TemporaryFile(dir=path, prefix="memopt-", buffering=0)  # noqa: SIM115
            try:
                if nbytes:
                    os.posix_fallocate(self.file.fileno(), 0, nbytes)
            except OSError:
                self.file.close()
                raise
        except OSError as error:
            raise refused(path, error) from error

    def write(self, flat: torch.Tensor, offset: int) -> None:
        left = _memory(flat)
        try:
            while left:
                written = os.pwrite(self.file.fileno(), left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise refused(self.path, error) from error

    def read(self, flat: torch.Tensor, offset: int) -> None:
        left = _memory(flat)
        try:
            while left:
                got = os.preadv(self.file.fileno(), [left], offset)
                if not got:
                    raise OSError(5, "the file ends before what was written there")
                left, offset = left[got:], offset + got
        except OSError as error:
            raise refused(self.path, error) from error


class OnDisk:
    """Bytes of a tensor in a file, and once they were wanted in memory again."""

    def __init__(self, file: DiskFile, offset: int, flat: torch.Tensor) -> None:
        self.file, self.offset, self.nbytes = file, offset, flat.nbytes
        self._flat: torch.Tensor | None = None
        file.write(flat, offset)

    def fetch(self) -> None:
        """Nothing can be read beside the computation: back() reads."""

    def back(self) -> torch.Tensor:
        if self._flat is None:
            flat = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            self.file.read(flat, self.offset)
            self._flat = flat
        return self._flat


def _memory(flat: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
