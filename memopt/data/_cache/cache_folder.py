"""A folder of entries by key, which any number of processes and machines use at once.

An entry is written to a file of another name and renamed when it is whole, so that no reader finds half of one, and its
checksum is compared at each reading. Correctness rests on these two alone; leases only save double work. Nothing is
flushed to the disk (fsync): after a loss of power an entry may be damaged, which is noticed and costs its making.

Where the folder cannot be written, or is full, values are returned uncached, and one warning says so.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import os
import re
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from memopt import _C
from memopt._runtime.log import logger
from memopt.data._cache import cache_entry
from memopt.data._cache.cache_counters import Counters

TOUCH_SECONDS = 60.0
"""An entry's time of use is written no more often: eviction goes by minutes."""
RETRY_SECONDS = 60.0
"""After a failure nothing is written for so long."""


class CacheFolder:
    """The files of a cache. `get` and `put` never raise for what the disk does."""

    def __init__(self, folder: str | os.PathLike[str], max_size: int | None, compress: bool) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self.max_size = max_size
        self.compress = compress
        self.counters = Counters()
        self._mapped = keeps_unlinked_files(self.folder)
        self._warned: set[str] = set()
        self._pause_until = 0.0
        self._eviction = Eviction(self.folder, max_size) if max_size is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pause_until": 0.0}

    def path(self, key: str) -> str:
        return os.path.join(self.folder, key[:2], f"{key[2:]}.safetensors")

    def probe(self) -> None:
        """Create the folder and write a file there, so that a warning comes at the start, from one process."""
        part = os.path.join(self.folder, f"{uuid.uuid4().hex}.part")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(part, "xb") as file:
                file.write(b"0")
        except OSError as error:
            self._failed(error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)

    # ---- reading ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> tuple[bool, Any]:
        """Return (True, value), or (False, None) if there is no complete entry."""
        path = self.path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False, None
        except OSError as error:
            remedy = (
                _REMEDIES.get(error.errno or 0, "")
                if error.errno in _TOO_MANY
                else "check who may read the folder"
            )
            self._warn("read", f"{path} cannot be read ({error.strerror}): {remedy}")
            return False, None
        try:
            content = cache_entry.load(descriptor, self._mapped)
            value = cache_entry.decode(content, key)
            self._touch(descriptor, path)
        except cache_entry.Unreadable as error:
            self._warn("unreadable", f"an entry of {self.folder} is skipped: {error}")
            return False, None
        except cache_entry.Damaged as error:
            self.counters.add("damaged")
            logger.info("cache entry %s dropped: %s", path, error)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return False, None
        except OSError as error:
            self._warn("read", f"{path} cannot be read ({error.strerror}); the value is computed again")
            return False, None
        finally:
            os.close(descriptor)
        self.counters.add("bytes_read", len(content))
        return True, value

    def _touch(self, descriptor: int, path: str) -> None:
        """Record the time of use, by which entries are evicted."""
        if self._eviction is None or time.time() - os.fstat(descriptor).st_mtime < TOUCH_SECONDS:
            return
        with contextlib.suppress(OSError):  # another's file, or a folder that cannot be written
            os.utime(path)

    # ---- writing ------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether there is an entry, which may still prove damaged."""
        return os.path.exists(self.path(key))

    def lease(self, key: str) -> tuple[bool, str | None]:
        """Return whether the caller is to make the entry, and the path of the lease that it holds for that and must
        release. False: another process makes it. The path is None if no lease is held: another process holds it, or
        none is available."""
        if self._paused():
            return True, None
        path = self._beside(key, "lease")
        taken = take_lease(path)
        return taken is not False, path if taken else None

    def wait(self, key: str) -> bool:
        """Wait for another process to make the entry. False: it did not, and has no claim any more."""
        lease = self._beside(key, "lease")
        arrived = wait_for_lease(lease, lambda: self.has(key), lambda: self._clock(lease))
        if not arrived:
            release_lease(lease)
        return arrived

    def put(self, key: str, value: Any) -> None:
        """Write the entry, or say once why that is impossible. Raises Unstorable for a value that no entry can hold."""
        if self._paused():
            self.counters.add("failed")
            return
        pieces = cache_entry.encode(value, key, self.compress)
        size = sum(len(piece) for piece in pieces)
        if self.max_size is not None and size > self.max_size:
            self._warn(
                "large",
                f"a value of {_C.format_size(size)} is larger than max_size={_C.format_size(self.max_size)} and is "
                "not cached",
            )
            self.counters.add("failed")
            return
        part = self._beside(key, f"{uuid.uuid4().hex}.part")
        try:
            if self._eviction is not None:
                self.counters.add("evicted", self._eviction.before_writing(size)[0])
            self._write(part, pieces)
            os.replace(part, self.path(key))
        except FileNotFoundError as error:  # clear(), of whichever process, took the part or its folder away
            logger.info("cache entry %s not written: %s", key, error)
            self.counters.add("failed")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part)
            self._failed(error)
            self.counters.add("failed")
        else:
            self.counters.add("bytes_written", size)

    def _write(self, part: str, pieces: list[bytes | memoryview]) -> None:
        try:
            file = open(part, "xb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:  # the first entry of its shard
            os.makedirs(os.path.dirname(part), exist_ok=True)
            file = open(part, "xb", buffering=0)  # noqa: SIM115
        with file:
            for piece in pieces:
                rest = memoryview(piece)
                while len(rest):
                    rest = rest[file.write(rest) :]

    def clear(self) -> int:
        """Remove every entry in the folder, of whatever function; other files remain. Return their number."""
        count, stayed = remove_all(self.folder)
        if stayed:
            self._warn(
                "clear", f"{stayed} files of {self.folder} belong to another user and remain: ask their owner"
            )
        if self._eviction is not None:
            self._eviction = Eviction(self.folder, self._eviction.max_size)
        return count

    def _beside(self, key: str, suffix: str) -> str:
        return os.path.join(self.folder, key[:2], f"{key[2:]}.{suffix}")

    def _clock(self, beside: str) -> float:
        """Return the current time by the clock of the file system: a file server's may differ from this machine's."""
        part = f"{os.path.splitext(beside)[0]}.{uuid.uuid4().hex}.part"
        try:
            with open(part, "xb") as file:
                file.write(b"0")  # the time of an empty file may be the client's
            return os.stat(part).st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)

    # ---- what goes wrong ----------------------------------------------------------------------------------------

    def _paused(self) -> bool:
        return time.monotonic() < self._pause_until

    def _failed(self, error: OSError) -> None:
        self._pause_until = time.monotonic() + RETRY_SECONDS
        remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and is writable")
        self._warn(
            "write",
            f"values are not cached: {self.folder} cannot be written ({error.strerror or error}); {remedy}. The run "
            "continues without the cache",
        )

    def _warn(self, about: str, text: str) -> None:
        """Warn once in a process; of a loader's workers only the first warns."""
        if about in self._warned:
            return
        self._warned.add(about)
        loading = sys.modules.get("torch.utils.data")
        worker = loading.get_worker_info() if loading is not None else None
        if worker is not None and worker.id > 0:
            logger.info("memopt.data.cached: %s", text)
        else:
            warnings.warn(f"memopt.data.cached: {text}", RuntimeWarning, stacklevel=2)


_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_REMEDIES = {
    **dict.fromkeys(
        _TOO_MANY, "too many files are open: raise the limit (`ulimit -n`), or close unneeded files"
    ),
    errno.ENOSPC: "the disk is full: free some space, or give max_size= or another dir=",
    errno.EDQUOT: "the quota is used up: free some space, or give max_size= or another dir=",
    errno.EFBIG: "the file exceeds the size limit: see `ulimit -f`",
    errno.EROFS: "the file system is mounted read-only: give another dir=, or mount it writable",
    errno.EACCES: "this user may not write there: give another dir=, or change its permissions",
    errno.EPERM: "this user may not write there: give another dir=, or change its permissions",
    errno.ENOTDIR: "a part of the path is not a folder: give another dir=",
    errno.EEXIST: "a file is in its place: give another dir=",
}


NETWORKED = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "glusterfs",
    "virtiofs",
)


def type_of(path: str) -> str:
    """Return the file system's type ("ext4", "nfs4", …) for a path or its nearest existing ancestor; "" if unknown."""
    here = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape").rstrip("/")
        inside = here == point or here.startswith(f"{point}/")
        if inside and len(point) >= best:  # of two on one point the later covers the earlier
            best, kind = len(point), after.split()[0]
    return kind


def keeps_unlinked_files(path: str) -> bool:
    """Return whether a file that another machine removes stays for those who have it mapped. On a network file system
    it does not: touching the mapping would end the process (SIGBUS), so files are read there instead."""
    return not type_of(path).startswith(NETWORKED)


# ---- eviction --------------------------------------------------------------------------------------------------------
# Eviction of the least recently used entries, which keeps a cache's folder within its size.
#
# No process knows what the others write, and there is no ledger that a killed one could leave wrong. So each looks at
# the folder itself, when it has written its share of the room that the last look found: half of the room divided by how
# many seem to be writing as fast. Close to the limit a look is due every few hundredths of the size; a look at n
# entries costs n calls of stat, which makes it some 20 a written entry for one process. Then the folder is emptied to
# nine tenths.


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
        """Make room when it is time to. Return the (entries, bytes) removed."""
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
        """Remove the least recently used entries, at least `excess` bytes, as far as this user may."""
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
        """Return (path, bytes) of the least recently used entries.

        However large the folder, no more than `excess` bytes of entries, and one, are held at once."""
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
    """Yield (path, stat result) of the entries, in no order.

    Entries that vanish meanwhile are left out, and leftovers of killed processes are removed."""
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
    """Return the bytes of all entries together."""
    return sum(there.st_size for _, there in entries(folder))


def remove_all(folder: str) -> tuple[int, int]:
    """Remove every entry and its files.

    Return (entries removed, files and folders of other users that remain). Nothing else in the folder is changed."""
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


# ---- leases ----------------------------------------------------------------------------------------------------------
# Leases: one process makes an entry, and others wait instead of making it too.
#
# A lease is a symbolic link beside the entry that names its holder: it is there with its name or not at all, so that
# one taken by a process that is killed the moment after can be told, too. Nothing hangs on it being right: who ignores
# it, or breaks it, does the work twice and no more.
#
# It cannot be stuck. Of a holder on this machine the kernel says whether it lives; of any other only time does, by the
# folder's own clock: a lease older than `SECONDS` is nobody's.


LEASE_SECONDS = 60.0
"""Lifetime of a lease whose process cannot be asked; values that take longer to make are made by others too."""
POLL_SECONDS = (0.001, 0.05)
"""First and longest pause between two looks at whether the entry is there."""


@functools.cache
def _machine() -> str:
    """Return an identity of this boot of the machine, and of this PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.uname().nodename} {uuid.getnode()}"


def _started(pid: int) -> str | None:
    """Return the start time of a process of this machine, in the kernel's ticks: with it a process id is unambiguous.

    None if there is no such process, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


@functools.lru_cache(1)
def _lease_holder(pid: int) -> str:
    return f"{_machine()} {pid} {_started(pid)}"


def take_lease(path: str) -> bool | None:
    """Take the lease. True: the caller holds it now. False: another process does. None: no lease is available here."""
    holder = _lease_holder(os.getpid())
    try:
        try:
            os.symlink(holder, path)
        except FileNotFoundError:  # the first of its folder
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(holder, path)
    except FileExistsError:
        return False
    except OSError:
        return None  # a folder in which nothing can be written has no leases either
    return True


def release_lease(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def is_leased(path: str, now: Callable[[], float]) -> bool:
    """Return whether a live process still seems to make the entry. now: seconds by the clock of the folder's file
    system."""
    try:
        holder, written = os.readlink(path), os.lstat(path).st_mtime
    except OSError:
        return False
    *machine, pid, started = ["", "", *holder.split(" ")]
    if " ".join(machine).strip() == _machine() and pid.isdigit():
        return _started(int(pid)) == started
    return now() - written < LEASE_SECONDS


def wait_for_lease(path: str, arrived: Callable[[], bool], now: Callable[[], float]) -> bool:
    """Wait until the entry exists (True), or its maker has ended or has used up its time (False).

    A caller waits at most `SECONDS`."""
    pause, longest = POLL_SECONDS
    end = time.monotonic() + LEASE_SECONDS
    while True:
        if arrived():
            return True
        if not is_leased(path, now) or time.monotonic() > end:
            return arrived()
        time.sleep(pause)
        pause = min(2 * pause, longest)
