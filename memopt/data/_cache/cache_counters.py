"""Counts of what a cache did, those of worker processes too.

A worker counts in a file of its own, which it maps: a count is one store in memory, a killed worker's counts stay, and
whoever made the cache adds up what all of them have."""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import struct
import tempfile
import uuid
import weakref
from dataclasses import dataclass, fields

from memopt import _C
from memopt._runtime.table import ResultTable


@dataclass
class CacheStatistics:
    """Counts of a cache in this process and in the workers that it was handed to."""

    hits: int = 0
    misses: int = 0
    waited: int = 0
    """Hits that another process made while this one waited for it."""
    damaged: int = 0
    """Entries that were not what was written: dropped, and made again."""
    evicted: int = 0
    failed: int = 0
    """Values that could not be written, and were returned uncached."""
    bytes_read: int = 0
    bytes_written: int = 0

    def __str__(self) -> str:
        asked = self.hits + self.misses
        share = f" ({100 * self.hits / asked:.1f} %)" if asked else ""
        rest = [
            f"{count} {name}"
            for name, count in (
                ("waited for", self.waited),
                ("damaged", self.damaged),
                ("evicted", self.evicted),
                ("not written", self.failed),
            )
            if count
        ]
        read, written = _C.format_size(self.bytes_read), _C.format_size(self.bytes_written)
        line = f"cache: {self.hits} hits of {asked}{share}, {read} read, {written} written"
        return ", ".join([line, *rest])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (name.replace("_", " "), _C.format_size(count) if name.startswith("bytes") else str(count))
            for name, count in vars(self).items()
        ]
        return ResultTable(rows, left=()).html()


_NAMES = [one.name for one in fields(CacheStatistics)]
_PLACE = {name: 8 * number for number, name in enumerate(_NAMES)}
_FORM = struct.Struct(f"<{len(_NAMES)}Q")


class Counters:
    """Counts of one cache. It pickles to workers, and each process that has it counts for itself."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder or os.path.join(tempfile.gettempdir(), f"memopt-counts-{uuid.uuid4().hex}")
        self._counts: bytearray | mmap.mmap = bytearray(_FORM.size)
        self._pid = os.getpid()
        self._is_maker = folder is None
        if self._is_maker:
            weakref.finalize(self, _remove, self._folder, self._pid)

    def __reduce__(self) -> tuple[type[Counters], tuple[str]]:
        return Counters, (self._folder,)

    def add(self, name: str, amount: int = 1) -> None:
        at = _PLACE[name]
        counts = self._mine()
        value = int.from_bytes(counts[at : at + 8], "little") + amount
        counts[at : at + 8] = value.to_bytes(8, "little")

    def total(self) -> CacheStatistics:
        sums = [0] * len(_NAMES)
        own = f"{os.getpid()}" if not isinstance(self._mine(), bytearray) else ""
        each = [bytes(self._mine())]
        for path in glob.glob(os.path.join(glob.escape(self._folder), "*")):
            if os.path.basename(path) != own:
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    each.append(file.read())
        for counts in each:
            if len(counts) == _FORM.size:
                sums = [a + b for a, b in zip(sums, _FORM.unpack(counts), strict=True)]
        return CacheStatistics(**dict(zip(_NAMES, sums, strict=True)))

    def _mine(self) -> bytearray | mmap.mmap:
        """Return this process's counts: after a fork or a pickle they start anew, in a file that the maker can read."""
        pid = os.getpid()
        if self._is_maker and pid == self._pid:
            return self._counts
        if pid != self._pid or isinstance(self._counts, bytearray):
            self._pid, self._is_maker = pid, False
            self._counts = _mapped(self._folder, pid)
        return self._counts


def _mapped(folder: str, pid: int) -> bytearray | mmap.mmap:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor = os.open(os.path.join(folder, str(pid)), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, _FORM.size
            )  # a full disk says so here, not by SIGBUS at a count
            return mmap.mmap(descriptor, _FORM.size)
        finally:
            os.close(descriptor)
    except OSError:
        return bytearray(_FORM.size)  # counted for this process alone


def _remove(folder: str, maker: int) -> None:
    if os.getpid() != maker:
        return
    for path in glob.glob(os.path.join(glob.escape(folder), "*")):
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
