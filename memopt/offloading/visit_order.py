"""The order in which layers are called, learned from one forward pass for the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class VisitOrder(Generic[T]):
    """first: the order that is expected of the first pass."""

    def __init__(self, first: Sequence[T]) -> None:
        self._expected: list[T] = list(first)
        self._now: list[T] = []
        self._at = 0  # of the expected, the next

    def begin(self) -> None:
        """A pass begins. What the last one did is expected of it."""
        if self._now:
            self._expected = self._now
        self._now, self._at = [], 0

    def saw(self, item: T) -> None:
        self._now.append(item)
        n = len(self._expected)
        # As expected; or further on, something was left out; or, in another order, wherever it was.
        for place in (*range(self._at, n), *range(min(self._at, n))):
            if self._expected[place] is item:
                self._at = place + 1
                return

    def ahead(self) -> Iterator[T]:
        """What is expected next, nearest first."""
        return iter(self._expected[self._at :])
