from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memopt import _C
from memopt._runtime.log import logger
from memopt.data._tuning.process_tree_memory import WorkerMemory, memory_of
from memopt.data._tuning.refcounted_containers import Container, containers_of

_SHOWN = 3  # containers of a report
_LEAST_BYTES = 4 << 20  # of growth that is worth a warning
_FIRST_PAUSE = 0.02  # seconds between the first two looks; each pause is twice the one before
_LEAST_SHARE = 0.1  # of it in the container: less may be anything


class WorkerGrowth(NamedTuple):
    """A worker's memory when it had given its first batch, and last."""

    pid: int
    first: WorkerMemory
    last: WorkerMemory


class WorkerWatch:
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
            if self.copied >= _LEAST_BYTES and self.suspects:
                logger.warning("%s", self)

    def _look(self, pids: list[int]) -> None:
        for pid in pids:
            found = memory_of(pid)
            if found is not None and found.resident:
                self._first.setdefault(pid, found)
                self._last[pid] = found

    @property
    def workers(self) -> list[WorkerGrowth]:
        return [WorkerGrowth(pid, first, self._last[pid]) for pid, first in self._first.items()]

    @property
    def copied(self) -> int:
        """Bytes that all workers' own written pages have grown by."""
        return sum(max(0, one.last.dirty - one.first.dirty) for one in self.workers)

    @property
    def suspects(self) -> list[Container]:
        """The containers that are large enough to have a part in that, the largest first."""
        each = self.copied / max(1, len(self._first))
        return [one for one in self.containers if one.nbytes >= _LEAST_SHARE * each][:_SHOWN]

    def __str__(self) -> str:
        if not self._first:
            return "no worker processes were seen: num_workers is 0, or nothing has been iterated yet"
        show = _C.format_size
        lines = [
            f"{len(self._first)} workers have {show(self.copied)} more of their own than at the first batch"
        ]
        for one in self.workers:
            grown = max(0, one.last.dirty - one.first.dirty)
            lines.append(
                f"  pid {one.pid}: +{show(grown)} written (copies of the parent's pages, or its own), resident "
                f"{show(one.first.resident)} -> {show(one.last.resident)}, of that files {show(one.last.file)} "
                f"(page cache, no leak), shared memory {show(one.last.shared)}"
            )
        if self.copied >= _LEAST_BYTES:
            for held in self.suspects:
                lines.append(
                    f"  {held.path}: {held.kind} of {held.length} {held.items}, {show(held.nbytes)}, is copied by "
                    f"being read: {held.remedy}"
                )
        return "\n".join(lines)


def watch(loader: Iterable[Any], *, interval: float = 1.0) -> WorkerWatch:
    """Watch how much memory a DataLoader's workers copy.

    Under fork a worker shares its parent's memory until it writes to it, and reading a Python object writes to its
    reference count. So a list of a million names is copied into each worker, page by page, over the epoch. The report
    says how many bytes the workers have written since they started, which containers of the dataset are large enough
    to be the copied ones, and how to share them. Growth is measured; the container is inferred from its size. Files (a
    memory-mapped dataset) are shown apart: they are page cache.

    The report is logged as a warning at the end of an epoch in which the workers have copied more than 4 MiB and a
    container is found. Needs Linux.

    Args:
        loader: A DataLoader, or a memopt.data.Prefetcher of one.
        interval: Seconds between looks, at first less. Each takes some milliseconds a worker.

    Returns:
        An iterable in the loader's place; print it for the report.

    Raises:
        ValueError: `interval` is negative.

    Example:
        >>> for batch in (watched := memopt.data.watch(loader)):
        ...     train(batch)
        >>> print(watched)
    """
    if interval < 0:
        raise ValueError(f"interval={interval}: 0 or more seconds")
    return WorkerWatch(loader, interval)
