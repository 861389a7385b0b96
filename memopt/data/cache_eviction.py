"""What keeps a cache's folder within its size: the entries that were used longest ago go.

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
        """Removes those used longest ago, `excess` bytes of them at least. Of a folder of any size no more than these
        are held at once."""
        oldest: list[tuple[float, str, int]] = []  # a heap: the one used last is on top
        held = 0
        for path, there in entries(self.folder):
            heapq.heappush(oldest, (-there.st_mtime, path, there.st_size))
            held += there.st_size
            while held - oldest[0][2] >= excess:
                held -= heapq.heappop(oldest)[2]
        count = gone = 0
        for _, path, size in oldest:
            with contextlib.suppress(FileNotFoundError):  # another process is at it too
                os.unlink(path)
                count, gone = count + 1, gone + size
        return count, gone


def shards(folder: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for one in found:
            if SHARD.fullmatch(one.name):
                yield one.path


def entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, what stat says) of the entries, in no order. What goes meanwhile is left out, and what a killed process
    left lying is removed on the way."""
    for shard in shards(folder):
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):
                    if ENTRY.fullmatch(one.name):
                        yield one.path, one.stat()
                    elif LEFTOVER.fullmatch(one.name):
                        written = one.stat(follow_symlinks=False).st_mtime
                        if time.time() - written > LEFT_SECONDS:
                            os.unlink(one.path)


def total_size(folder: str) -> int:
    """Bytes of all entries together."""
    return sum(there.st_size for _, there in entries(folder))


def remove_all(folder: str) -> tuple[int, int]:
    """Removes every entry, and what belongs to one: (entries, bytes). Nothing else in the folder is touched."""
    count = gone = 0
    for shard in list(shards(folder)):
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as found:
            for one in list(found):
                with contextlib.suppress(FileNotFoundError):
                    if ENTRY.fullmatch(one.name):
                        size = one.stat().st_size
                        os.unlink(one.path)
                        count, gone = count + 1, gone + size
                    elif LEFTOVER.fullmatch(one.name):
                        os.unlink(one.path)
        with contextlib.suppress(OSError):
            os.rmdir(shard)  # another process may just have written into it
    return count, gone
