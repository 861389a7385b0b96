"""The search for the largest size that fits, and which size is worth trying next. Numbers alone: no torch.

`low` is the largest that has fitted (least - 1 before any has), `high` the smallest that has not (most + 1 before any):
low <= answer < high at all times, and the search is over when high - low is 1, or within a given part of low.

Sizes double until one fails, and then the gap is halved; but bytes grow as a line in most training steps, so where the
line through what was measured meets the room is tried before that. A line that misleads costs tries: after two that
brought little comes one that halves for sure, so that n tries beyond the doubling close a gap of 2^(n/3).
"""

from __future__ import annotations


class Bracket:
    def __init__(self, start: int, least: int, most: int, room: int, within: float = 0.0) -> None:
        """Begin a search.

        start: tried first, or what is nearest to it of least … most; room: bytes that may be taken; within: the answer
        may be too small by that part of itself.
        """
        self._within = within
        self.low, self.high, self.least, self.most, self.room = least - 1, most + 1, least, most, room
        self._points: dict[int, int] = {}
        self._base: int | None = None
        self._next: int | None = min(max(start, least), most)
        self._poor = 0  # guesses in a row that did not halve the gap
        self._gap = self.high

    def next(self) -> int | None:
        """The size to try; None when low is the answer."""
        if self.high - self.low <= max(1, self._within * self.low):
            return None
        if self._next is not None:
            return self._next
        gap = self.high - self.low
        self._poor = 0 if 2 * gap <= self._gap else self._poor + 1
        self._gap = gap
        guess = self._meets()
        if guess is not None and self.low <= guess < self.high and self._poor < 3:
            # Beyond its second point a line is trusted for three doublings.
            return min(max(guess, self.low + 1), 8 * self.low)
        self._poor = 0
        if self.high > self.most:  # none has failed so far
            return min(8 * self.low if guess is not None and guess > self.most else 2 * self.low, self.most)
        return (self.low + self.high) // 2

    def fits(self, size: int, taken: int, left: int | None = None) -> None:
        """taken: bytes of the room; left: those of it that stay when the step is over, as if it had no samples."""
        if left is not None and left < taken:
            self._base = left
        self._next = None
        self._points[size] = taken
        self.low = max(self.low, size)

    def fails(self, size: int) -> None:
        """Also of a size that fitted once, and does not any more."""
        self._next = None
        self.high = min(self.high, size)
        self._points = {n: taken for n, taken in self._points.items() if n < self.high}
        self.low = max(self._points, default=self.least - 1)

    @property
    def best(self) -> int | None:
        """The largest that has fitted."""
        return max(self._points, default=None)

    def _meets(self) -> int | None:
        """The size at which the line through the two largest that fit, or through one and its rest, meets the room."""
        points = dict(self._points)
        if len(points) == 1 and self._base is not None:
            points[0] = self._base
        if len(points) < 2:
            return None
        first, last = sorted(points)[-2:]
        slope = points[last] - points[first]
        if slope <= 0:
            return None
        return first + (self.room - points[first]) * (last - first) // slope
