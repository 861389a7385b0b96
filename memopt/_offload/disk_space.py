"""Room in files without names on a disk (csrc/transfer/disk.h), until nothing refers to it.

What is given back in a file is used again only when the file is empty. So a pass that begins while another's graph
lives, of which something is back already, has a file of its own, and each goes with the last graph in it: what the
files take is at most what lives, and what was given back since the last pass began."""

from __future__ import annotations

import errno
import os
import threading
import weakref

from memopt import _C
from memopt._offload.pinned_pool import ALIGNED

MOST = 1 << 46  # bytes of a file, so that its ring never goes round; ext4 ends at 16 TiB, others later


class DiskSpace:
    """One file, written and read by one thread of the engine's. Raises OSError where there can be none."""

    def __init__(self, directory: str) -> None:
        self.disk, self._ring = _C.Disk(directory), _C.Ring(MOST, ALIGNED)
        self.has_holes = False

    def take(self, nbytes: int) -> DiskRoom:
        found = self._ring.take(nbytes)
        if found is None:
            raise OSError(errno.EFBIG, f"{nbytes} bytes more than {_C.format_size(MOST)} in one file")
        return DiskRoom(self, *found[:2])

    def give(self, slot: int) -> None:
        self._ring.give(slot)
        self.has_holes = self._ring.held()[0] > 0


class DiskRoom:
    __slots__ = ("_slot", "_space", "disk", "offset")

    def __init__(self, space: DiskSpace, slot: int, offset: int) -> None:
        self._space, self._slot, self.disk, self.offset = space, slot, space.disk, offset

    def __del__(self) -> None:
        self._space.give(self._slot)


_spaces: weakref.WeakValueDictionary[tuple[int, str], DiskSpace] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def disk_space(directory: str) -> DiskSpace:
    """For a pass that begins: the one of this process in that directory that somebody holds and nothing has been given
    back in, else a new one. A child of a fork has its own."""
    key = os.getpid(), os.path.abspath(directory)
    with _lock:
        space = _spaces.get(key)
        if space is None or space.has_holes:
            space = _spaces[key] = DiskSpace(key[1])
        return space


def give_up(space: DiskSpace) -> None:
    """It failed: who asks next has another."""
    with _lock:
        for key in [key for key, value in _spaces.items() if value is space]:
            del _spaces[key]
