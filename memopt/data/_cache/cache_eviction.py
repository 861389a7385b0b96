"""Eviction of the least recently used entries, which keeps a cache's folder within its size.

No process knows what the others write, and there is no ledger that a killed one could leave wrong. So each looks at the
folder itself, when it has written its share of the room that the last look found: half of the room divided by how many
seem to be writing as fast. Close to the limit a look is due every few hundredths of the size; a look at n
entries costs n calls of stat, which makes it some 20 a written entry for one process. Then the folder is emptied to
nine tenths."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections.abc import Iterator

from memopt._runtime.log import logger

ENTRY = re.compile(r"[0-9a-f]{38}\.safetensors")
LEFTOVER = re.compile(r"[0-9a-f]{38}\.(lease|[0-9a-z_]+\.part)")
SHARD = re.compile(r"[0-9a-f]{2}")
KEPT = 0.9
"""The share of max_size that is left after entries went."""
SMALLEST_SHARE = 1 / 16
"""Of a process that wrote little or nothing yet: so many may begin at once."""
LEFT_SECONDS = 3600.0
"""After this long a part of a file or a lease is nobody's: its process was killed."""


class Eviction:
    """The size limit of one folder, as one process sees it."""

    def __init__(self, folder: str, max_size: int) -> None:
        self.folder = folder
        self.max_size = max_size
        self.written = 0
        """Bytes written by this process since its last look."""
        self.allowance = 0
        """Bytes it may write until the next one; none before the first."""
        self._total: int | None = None
        self._kept: set[str] = set()
        """Entries that this process may not remove: another user's, in a folder that is shared."""

    def before_writing(self, nbytes: int) -> tuple[int, int]:
        """Makes room where it is time to. (entries, bytes) that went."""
        self.written += nbytes
        if self.written <= self.allowance:
            return 0, 0
        total = total_size(self.folder)
        gone = count = 0
        if total + nbytes > self.max_size:
            count, gone = self._evict(total + nbytes - int(KEPT * self.max_size))
        grown = total - self._total if self._total is not None else 0
        share = self.written / grown if grown > 0 else 0.0
        if self._total is not None and grown <= self.written:
            share = 1.0  # nobody else wrote anything
        self._total, self.written = total - gone, nbytes
        room = self.max_size - self._total
        self.allowance = int(min(1.0, max(SMALLEST_SHARE, share)) * room / 2)
        return count, gone

    def _evict(self, excess: int) -> tuple[int, int]:
        """Removes those used longest ago, `excess` bytes of them at least, as far as this user may."""
        count = gone = freed = 0
        while freed < excess:
            found = self._oldest(excess - freed)
            for path, size in found:
                try:
                    os.unlink(path)
                except FileNotFoundError:  # another process is at it too
                    freed += size
                except OSError as error:
                    logger.info("cache entry %s cannot be removed: %s", path, error)
                    self._kept.add(path)
                else:
                    count, gone, freed = count + 1, gone + size, freed + size
            if not found:
                break  # all that is left is others'
        return count, gone

    def _oldest(self, excess: int) -> list[tuple[str, int]]:
        """(path, bytes) of those used longest ago. Of a folder of any size no more than `excess` bytes of entries, and
        one, are held at once."""
        oldest: list[tuple[float, str, int]] = []  # a heap: the one used last is on top
        held = 0
        for path, there in entries(self.folder):
            if path in self._kept:
                continue
            heapq.heappush(oldest, (-there.st_mtime, path, there.st_size))
            held += there.st_size
            while held - oldest[0][2] >= excess:
                held -= heapq.heappop(oldest)[2]
        return [(path, size) for _, path, size in oldest]


_NOT_OURS = (FileNotFoundError, PermissionError)
"""It went meanwhile, or is another user's: one such must not keep this process from the others."""


def shards(folder: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for one in found:
            if SHARD.fullmatch(one.name):
                yield one.path


def entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, what stat says) of the entries, in no order. What goes meanwhile is left out, and what a killed process
    left lying is removed on the way."""
    for shard in shards(folder):
        with contextlib.suppress(*_NOT_OURS), os.scandir(shard) as found:
            for one in found:
                with contextlib.suppress(*_NOT_OURS):
                    if ENTRY.fullmatch(one.name):
                        yield one.path, one.stat()
                    elif LEFTOVER.fullmatch(one.name):
                        written = one.stat(follow_symlinks=False).st_mtime
                        if time.time() - written > LEFT_SECONDS:
                            with contextlib.suppress(OSError):  # another user's may stay
                                os.unlink(one.path)


def total_size(folder: str) -> int:
    """Bytes of all entries together."""
    return sum(there.st_size for _, there in entries(folder))


def remove_all(folder: str) -> tuple[int, int]:
    """Removes every entry, and what belongs to one: (entries that went, files and folders that are another user's and
    stayed). Nothing else in the folder is touched."""
    count = stayed = 0
    for shard in list(shards(folder)):
        try:
            with os.scandir(shard) as found:
                names = [one.name for one in found]
        except _NOT_OURS as error:
            stayed += isinstance(error, PermissionError)
            continue
        for name in names:
            is_entry = ENTRY.fullmatch(name) is not None
            if not is_entry and not LEFTOVER.fullmatch(name):
                continue
            try:
                os.unlink(os.path.join(shard, name))
                count += is_entry
            except _NOT_OURS as error:
                stayed += isinstance(error, PermissionError)
        with contextlib.suppress(OSError):
            os.rmdir(shard)  # another process may just have written into it
    return count, stayed
