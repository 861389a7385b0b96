"""A folder of entries by key, which any number of processes and machines use at once.

An entry is written to a file of another name and renamed when it is whole, so that no reader finds half of one, and its
checksum is compared at each reading. Correctness rests on these two alone; leases only save double work. Nothing is
flushed to the disk (fsync): after a loss of power an entry may be damaged, which is noticed and costs its making.

Where the folder cannot be written, or is full, values are returned uncached, and one warning says so."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import uuid
import warnings
from typing import Any

from memopt import _C
from memopt._runtime.log import logger
from memopt.data._cache import cache_entry, cache_eviction, cache_lease
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
        self._eviction = cache_eviction.Eviction(self.folder, max_size) if max_size is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pause_until": 0.0}

    def path(self, key: str) -> str:
        return os.path.join(self.folder, key[:2], f"{key[2:]}.safetensors")

    def probe(self) -> None:
        """Makes the folder and writes a file there, so that a warning comes at the start, of one process."""
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
        """(True, value), or (False, None) where there is no entry, or none that is whole."""
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
            self._warn("unreadable", f"an entry of {self.folder} is left unread: {error}")
            return False, None
        except cache_entry.Damaged as error:
            self.counters.add("damaged")
            logger.info("cache entry %s dropped: %s", path, error)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return False, None
        except OSError as error:
            self._warn("read", f"{path} cannot be read ({error.strerror}); the value is made again")
            return False, None
        finally:
            os.close(descriptor)
        self.counters.add("bytes_read", len(content))
        return True, value

    def _touch(self, descriptor: int, path: str) -> None:
        """Notes the time of use, which eviction goes by."""
        if self._eviction is None or time.time() - os.fstat(descriptor).st_mtime < TOUCH_SECONDS:
            return
        with contextlib.suppress(OSError):  # another's file, or a folder that cannot be written
            os.utime(path)

    # ---- writing ------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether there is an entry, which may yet prove damaged."""
        return os.path.exists(self.path(key))

    def lease(self, key: str) -> tuple[bool, str | None]:
        """(whether the caller is to make the entry, the path of the lease that it holds for that and is to release).
        False: another process makes it. A lease is not held, either, where none can be had."""
        if self._paused():
            return True, None
        path = self._beside(key, "lease")
        taken = cache_lease.take(path)
        return taken is not False, path if taken else None

    def wait(self, key: str) -> bool:
        """Waits for another process to make the entry; False: it did not, and has no claim any more."""
        lease = self._beside(key, "lease")
        arrived = cache_lease.wait(lease, lambda: self.has(key), lambda: self._clock(lease))
        if not arrived:
            cache_lease.release(lease)
        return arrived

    def put(self, key: str, value: Any) -> None:
        """Writes the entry, or says once why it cannot. Unstorable for a value that no entry can hold."""
        if self._paused():
            self.counters.add("failed")
            return
        pieces = cache_entry.encode(value, key, self.compress)
        size = sum(len(piece) for piece in pieces)
        if self.max_size is not None and size > self.max_size:
            self._warn(
                "large",
                f"a value of {_C.format_size(size)} is larger than max_size={_C.format_size(self.max_size)}"
                " and is not kept",
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
        """Removes every entry in the folder, of whatever function; what else lies there stays. Returns how many."""
        count, stayed = cache_eviction.remove_all(self.folder)
        if stayed:
            self._warn(
                "clear", f"{stayed} files of {self.folder} are another user's, and stay: ask who owns them"
            )
        if self._eviction is not None:
            self._eviction = cache_eviction.Eviction(self.folder, self._eviction.max_size)
        return count

    def _beside(self, key: str, suffix: str) -> str:
        return os.path.join(self.folder, key[:2], f"{key[2:]}.{suffix}")

    def _clock(self, beside: str) -> float:
        """Now, by the clock of the file system: a file server's need not agree with this machine's."""
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
        remedy = _REMEDIES.get(error.errno or 0, "see that the folder is there and can be written")
        self._warn(
            "write",
            f"values are not kept: {self.folder} cannot be written ({error.strerror or error}); {remedy}. "
            "The run goes on, uncached",
        )

    def _warn(self, about: str, text: str) -> None:
        """Once in a process, and of a loader's workers only in the first."""
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
        _TOO_MANY, "too many files are open: raise the limit (`ulimit -n`), or close what is not needed"
    ),
    errno.ENOSPC: "the disk is full: free some of it, or give max_size= or another dir=",
    errno.EDQUOT: "the quota is used up: free some of it, or give max_size= or another dir=",
    errno.EFBIG: "files may not grow that large here: see `ulimit -f`",
    errno.EROFS: "the file system is mounted read-only: give another dir=, or mount it to be written",
    errno.EACCES: "this user may not write there: give another dir=, or change who may",
    errno.EPERM: "this user may not write there: give another dir=, or change who may",
    errno.ENOTDIR: "a part of the path is no folder: give another dir=",
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
    """The file system's type ("ext4", "nfs4", …) of a path or of its nearest ancestor that exists; "" if unknown."""
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
    """Whether a file that another machine removes stays for those who have it mapped. On a network file system it does
    not: touching the mapping would end the process (SIGBUS), so files are read there instead."""
    return not type_of(path).startswith(NETWORKED)
