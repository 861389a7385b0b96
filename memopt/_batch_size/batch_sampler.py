"""Batches of indices whose size follows a BatchSize."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt._batch_size.adaptive import BatchSize


class AdaptiveBatchSampler:
    """A batch sampler for DataLoader(batch_sampler=); BatchSize.sampler() makes it.

    Each sample comes once an epoch, and those of a batch that ran out of memory again, in smaller batches: next where
    the loader has no workers, with workers after what they have fetched already (num_workers * prefetch_factor batches,
    of the size before). What failed after the last batch had been asked for comes first in the next epoch.

    That is known by order: the n-th BatchSize.attempt() is taken to be the n-th batch. In a loop without attempts
    nothing comes again. len() is of the epoch at the size now.
    """

    def __init__(self, samples: Iterable[int], size: BatchSize, *, drop_last: bool = False) -> None:
        self._samples, self._size, self._drop_last = samples, size, drop_last
        self._given: deque[list[int]] = deque()  # that no attempt has ended with so far
        self._again: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self._given.clear()  # an epoch that was left early has attempts for none of them
        fresh = iter(self._samples)
        while True:
            batch: list[int] = []
            size = self._size.value
            while len(batch) < size and self._again:
                batch.append(self._again.popleft())
            while len(batch) < size:
                index = next(fresh, None)
                if index is None:
                    break
                batch.append(index)
            if not batch or (self._drop_last and len(batch) < size):
                return
            self._given.append(batch)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._samples, Sized):
            raise TypeError(f"{type(self._samples).__name__} has no length, so neither have its batches")
        whole = len(self._samples) + len(self._again)
        return whole // self._size.value if self._drop_last else math.ceil(whole / self._size.value)

    @property
    def open(self) -> list[int] | None:
        """The earliest batch that no attempt has ended with."""
        return self._given[0] if self._given else None

    def ended(self, failed: bool) -> None:
        """Note the end of the attempt at the earliest batch that is still open.

        Args:
            failed: Whether it ran out of memory.
        """
        batch = self._given.popleft() if self._given else []
        if failed:
            self._again.extend(batch)
