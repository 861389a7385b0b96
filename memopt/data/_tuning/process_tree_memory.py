"""Memory of a process and of its process tree: what loading takes of the host."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from memopt._runtime.host_memory import descendants


class WorkerMemory(NamedTuple):
    """Bytes. resident: as `top` shows it; pss: with what n processes share counted an nth; dirty: written to, and in
    no other process, copies of a parent's pages among it; file: pss of files, page cache that the kernel takes back
    when it wants it; shared: pss of shared memory, SharedList's among it; anonymous: pss of the rest, in no
    file."""

    resident: int
    pss: int
    dirty: int
    file: int
    shared: int
    anonymous: int


def memory_of(pid: int, proc: str = "/proc") -> WorkerMemory | None:
    """None of a process that is gone, or not ours to look into."""
    try:
        text = (Path(proc) / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    fields = {}
    for line in text.splitlines()[1:]:
        name, _, size = line.partition(":")
        fields[name] = int(size.split()[0]) << 10
    return WorkerMemory(
        fields.get("Rss", 0),
        fields.get("Pss", 0),
        fields.get("Private_Dirty", 0),
        fields.get("Pss_File", 0),
        fields.get("Pss_Shmem", 0),
        fields.get("Pss_Anon", 0),
    )


class Taken(NamedTuple):
    """Bytes. own: memory that only goes with the processes, shared memory included; file: of mapped files, page cache
    that the kernel takes back when it wants it."""

    own: int
    file: int


class FamilyMemory:
    """Memory of a forked child and its descendants beyond what this process had before the fork. Make it before.

    own is the PSS of anonymous memory of all of them and of this process, so that a page of this process's that the
    child only reads counts nothing, and one of which it has its own copy counts. Shared memory is counted by the files
    that lie behind it, whether anyone has them mapped or not: batches on their way from a worker are mapped by nobody.
    Where batches go by files of which nobody keeps a descriptor (by_descriptor is False: torch's sharing strategy
    "file_system"), only what is mapped can be seen."""

    def __init__(self, *, by_descriptor: bool = True) -> None:
        self._by_descriptor = by_descriptor
        self._known = _shared_files(os.getpid())
        here = memory_of(os.getpid())
        if here is None:
            raise OSError("/proc/self/smaps_rollup cannot be read: memory cannot be measured here")
        self._before = here

    def look(self, child: int, *, stands_for_parent: bool) -> Taken:
        """stands_for_parent: the child does what this process will do itself: what it copies of this process's pages
        by reading them is no part of it."""
        anonymous = file = 0
        shared: dict[tuple[int, int], int] = {}
        mapped = 0
        for pid in [child, *descendants(child)]:
            found = memory_of(pid)
            if found is None:  # it has ended since
                continue
            anonymous += found.anonymous
            file += found.file
            mapped += found.shared
            shared |= _shared_files(pid)
        here = memory_of(os.getpid()) or self._before
        anonymous += here.anonymous - self._before.anonymous
        mapped += here.shared - self._before.shared
        if stands_for_parent:
            anonymous -= (
                here.dirty
            )  # after a fork a page is this process's alone when the child has its own copy
        behind = sum(size for place, size in shared.items() if place not in self._known)
        if not self._by_descriptor:
            behind = max(behind, mapped)
        return Taken(max(0, anonymous) + behind, max(0, file + here.file - self._before.file))


def is_running(pid: int, proc: str = "/proc") -> bool:
    """False of one that is gone, or that has ended and waits to be noticed."""
    try:
        state = Path(proc, str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of memory by file, of the open files that lie in memory and have no name (any more)."""
    found = {}
    for name in _entries(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):  # it was closed since
            if os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                about = os.stat(path)
                if stat.S_ISREG(about.st_mode):
                    found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return found


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
