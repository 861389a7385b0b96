"""memopt.data.watch: the host memory that a DataLoader's workers take, and which containers make them copy it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from memopt import _C
from memopt._runtime.host_memory import descendants
from memopt._runtime.log import logger
from memopt._runtime.results import Result, plain

_SHOWN = 3  # containers of a report
_LEAST_BYTES = 4 << 20  # of growth that is worth a warning
_FIRST_PAUSE = 0.02  # seconds between the first two looks; each pause is twice the one before
_LEAST_SHARE = 0.1  # of it in the container: less may be anything


class WorkerGrowth(NamedTuple):
    """A worker's memory at its first batch, and at its last."""

    pid: int
    first: WorkerMemory
    last: WorkerMemory


class WorkerWatch(Result):
    """The report of `watch`: iterate it in the loader's place, then print it."""

    def __init__(self, loader: Iterable[Any], interval: float) -> None:
        self._loader, self._interval = loader, interval
        self._first: dict[int, WorkerMemory] = {}
        self._last: dict[int, WorkerMemory] = {}
        self.containers: list[Container] = []

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._first.clear()
        self._last.clear()
        batches = iter(self._loader)
        # A Prefetcher's iterator has the loader's for its source.
        loading = batches if hasattr(batches, "_workers") else getattr(batches, "source", None)
        pids = [one.pid for one in getattr(loading, "_workers", ())]
        due = 0.0  # the first look is after the first batch: what a worker does to begin with is behind it
        pause = min(_FIRST_PAUSE, self._interval)  # at the end of a short epoch the workers are gone
        try:
            for batch in batches:
                yield batch
                if time.monotonic() >= due:
                    self._look(pids)
                    due = time.monotonic() + pause
                    pause = min(2 * pause, self._interval)
        finally:
            self._look(pids)
            if self._first:
                self.containers = containers_of(getattr(self._loader, "dataset", None))
            if self.copied_bytes >= _LEAST_BYTES and self.suspects:
                logger.warning("%s", self)

    def _look(self, pids: list[int]) -> None:
        for pid in pids:
            found = process_memory(pid)
            if found is not None and found.resident:
                self._first.setdefault(pid, found)
                self._last[pid] = found

    @property
    def workers(self) -> list[WorkerGrowth]:
        return [WorkerGrowth(pid, first, self._last[pid]) for pid, first in self._first.items()]

    @property
    def copied_bytes(self) -> int:
        """The growth, in bytes, of all workers' private written pages."""
        return sum(max(0, one.last.dirty - one.first.dirty) for one in self.workers)

    @property
    def suspects(self) -> list[Container]:
        """The containers that are large enough to contribute to that, the largest first."""
        each = self.copied_bytes / max(1, len(self._first))
        return [one for one in self.containers if one.nbytes >= _LEAST_SHARE * each][:_SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values: of each worker, and the containers that may be copied."""
        return {
            "copied_bytes": self.copied_bytes,
            "workers": [plain(one) for one in self.workers],
            "suspects": [plain(one) for one in self.suspects],
        }

    def __str__(self) -> str:
        if not self._first:
            return "no worker processes were seen: num_workers is 0, or the loader has not been iterated yet"
        show = _C.format_size
        lines = [
            f"{len(self._first)} workers have {show(self.copied_bytes)} more private memory than at the first batch"
        ]
        for one in self.workers:
            grown = max(0, one.last.dirty - one.first.dirty)
            lines.append(
                f"  pid {one.pid}: +{show(grown)} written (copies of the parent's pages, or its own), resident "
                f"{show(one.first.resident)} -> {show(one.last.resident)}, of which files {show(one.last.file)} (page "
                f"cache, no leak), shared memory {show(one.last.shared)}"
            )
        if self.copied_bytes >= _LEAST_BYTES:
            for held in self.suspects:
                lines.append(
                    f"  {held.path}: {held.kind} of {held.length} {held.items}, {show(held.nbytes)}, is copied when "
                    f"it is read: {held.remedy}"
                )
        return "\n".join(lines)


def watch(loader: Iterable[Any], *, interval: float = 1.0) -> WorkerWatch:
    """Watch how much memory a DataLoader's workers copy.

    Under fork a worker shares its parent's memory until it writes to it, and reading a Python object writes to its
    reference count. So a list of a million names is copied into each worker, page by page, over the epoch. The report
    says how many bytes the workers have written since they started, which containers of the dataset are large enough to
    be the copied ones, and how to share them. Growth is measured; the container is inferred from its size. Files (a
    memory-mapped dataset) are shown separately, because they are page cache.

    The report is logged as a warning at the end of an epoch in which the workers have copied more than 4 MiB and a
    container is found. Needs Linux.

    Args:
        loader: A DataLoader, or a memopt.data.Prefetcher of one.
        interval: Seconds between samples, at first less. Each sample takes some milliseconds per worker.

    Returns:
        An iterable in the loader's place; print it for the report.

    Raises:
        ValueError: `interval` is negative.

    Examples:
        >>> for batch in (watched := memopt.data.watch(loader)):
        ...     train(batch)
        >>> print(watched)
    """
    if interval < 0:
        raise ValueError(f"interval={interval}: expected 0 or more seconds")
    return WorkerWatch(loader, interval)


# ---- memory of processes ---------------------------------------------------------------------------------------------


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


def process_memory(pid: int, proc: str = "/proc") -> WorkerMemory | None:
    """Return a process's memory; None if it has ended or may not be inspected."""
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
        here = process_memory(os.getpid())
        if here is None:
            raise OSError("/proc/self/smaps_rollup cannot be read: memory cannot be measured here")
        self._before = here

    def look(self, child: int, *, stands_for_parent: bool) -> Taken:
        """Measure.

        stands_for_parent: the child does what this process will do itself, so pages of this process that it copies by
        reading them do not count."""
        anonymous = file = 0
        shared: dict[tuple[int, int], int] = {}
        mapped = 0
        for pid in [child, *descendants(child)]:
            found = process_memory(pid)
            if found is None:  # it has ended since
                continue
            anonymous += found.anonymous
            file += found.file
            mapped += found.shared
            shared |= _shared_files(pid)
        here = process_memory(os.getpid()) or self._before
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
    """Return whether the process runs; False if it is gone, or is a zombie."""
    try:
        state = Path(proc, str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes of memory by file, for open unnamed files in memory."""
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


# ---- containers of many small Python objects -------------------------------------------------------------------------
# Containers of many small Python objects in a dataset: what a worker process copies by reading it, as reading writes
# to reference counts.


LEAST = 1000  # items of a container that is worth a line
_SAMPLE = 200  # items whose sizes stand for all
_DEPTH = 4
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Container(NamedTuple):
    """path: "dataset.samples"; nbytes: of the container and its items, from a sample of them."""

    path: str
    kind: str
    length: int
    items: str  # "str", "tuple", "mixed"
    nbytes: int

    @property
    def remedy(self) -> str:
        if self.kind == "dict":
            return f"{self.path} = memopt.data.SharedDict({self.path})"
        name = "SharedStrings" if self.items == "str" else "SharedList"
        given = self.path if self.kind in ("list", "tuple") else f"list({self.path})"
        return f"{self.path} = memopt.data.{name}({given})"


def containers_of(dataset: object, path: str = "dataset") -> list[Container]:
    """Return the containers of a data set, the largest first.

    Attributes are followed, and the content of lists and dicts of few items; no code of the data set runs."""
    found: list[Container] = []
    seen: set[int] = set()
    ahead: list[tuple[str, Any, int]] = [(path, dataset, 0)]
    while ahead:
        where, value, depth = ahead.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            if len(value) >= LEAST:
                found.append(_measured(where, value))
            elif type(value) is dict:
                ahead += [(f"{where}[{key!r}]", one, depth + 1) for key, one in value.items()]
            elif type(value) in (list, tuple):
                ahead += [(f"{where}[{i}]", one, depth + 1) for i, one in enumerate(value)]
        elif not isinstance(value, type):
            ahead += [(f"{where}.{name}", one, depth + 1) for name, one in _attributes(value)]
    return sorted(found, key=lambda one: -one.nbytes)


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Return the attributes in its __dict__ and its slots, without calling a __getattr__."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        held = {}
    found = list(held.items()) if type(held) is dict else []
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if type(slot).__name__ == "member_descriptor":
                try:
                    found.append((name, slot.__get__(value)))
                except AttributeError:  # not set
                    continue
    return found


def _measured(path: str, value: Any) -> Container:
    count = len(value)
    if type(value) in (list, tuple):
        half = _SAMPLE // 2  # some in a row, as what alternates would hide from a stride; some from all over
        some = [*value[:half], *(value[i * count // half] for i in range(half))]
    else:
        some = list(islice(value.items() if type(value) is dict else value, _SAMPLE))
    if type(value) is dict:
        kinds = {type(one).__name__ for _, one in some}
        mean = sum(_size(key) + _size(one) for key, one in some) / len(some)
    else:
        kinds = {type(one).__name__ for one in some}
        mean = sum(map(_size, some)) / len(some)
    items = kinds.pop() if len(kinds) == 1 else "mixed"
    return Container(path, type(value).__name__, count, items, sys.getsizeof(value) + int(mean * count))


def _size(value: object, depth: int = 0) -> int:
    size = sys.getsizeof(value) if type(value).__module__ == "builtins" else 64
    if depth < _DEPTH and type(value) in _CONTAINERS:
        parts: Any = (
            [*value.keys(), *value.values()] if type(value) is dict else value  # type: ignore[attr-defined]
        )
        size += sum(_size(one, depth + 1) for one in islice(parts, 100))
    return size
