"""Searches with few runs for the largest size that fits and the smallest that suffices; each run takes seconds."""

from __future__ import annotations

from collections.abc import Callable


class NoEffect(ValueError):
    """Raised if twice the size takes not a byte more: the searched option does not change the need."""


def smallest(suffices: Callable[[int], bool], low: int, high: int, step: int) -> int:
    """The least number above `low` that suffices, to within `step`, by bisection; `high` is known to."""
    while high - low > step:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def largest(
    measure: Callable[[int], int | None],
    room: int,
    start: int,
    most: int,
    *,
    known: dict[int, int] | None = None,
    close: float = 0.0,
) -> tuple[int, bool]:
    """Return the largest n, at most `most`, for which measure(n) is a number of bytes, and whether it is a bound.

    measure(n) is None if n does not fit; the result is 0 if not even 1 does. It is a bound if n + 1 does not fit or
    `most` is reached; it is none if larger n take no more bytes. `known`: bytes of some n that were measured without a
    limit. With `close` the result may be too small by that fraction of itself.

    Bytes are assumed to grow linearly, and the n at which that line meets `room` is tried next. Steps that double and
    halve do the rest, so the result is exact (n fits, n + 1 does not) however the bytes grow.
    """
    fits: dict[int, int] = {}
    points = dict(known or {})
    low, high = 0, most + 1
    probe, step, guessed = min(start, most), 1, False
    while high - low > max(1, close * low):
        size, before = measure(probe), high - low
        if size is None:
            high = probe
            room -= room // 20  # an allocator needs room beside what it hands out: the line is met too late
        else:
            flat = low > 0 and probe >= 2 * low and size <= fits[low]
            if flat and len(fits) == 1:
                raise NoEffect
            low, fits[probe] = probe, size
            points[probe] = size
            if flat:
                return low, False
        met = _meets(points, room)
        # One guess that brings little is followed by what halves for sure.
        guessed = met is not None and not (guessed and high <= most and 2 * (high - low) > before)
        if guessed and met is not None and met > low:
            # A line that is wrong must not ask for the moon: each run's data are made on this host.
            probe = min(met, high - 1, 8 * low)
        elif guessed:
            probe = min(low + step, (low + high) // 2)
            step *= 2
        elif not low and len(points) < 2 and high > 2:
            probe = 1  # either the answer is 0, or a line has its other point
        else:
            probe = (low + high) // 2 if high <= most else min(2 * low, most)
    return low, True


def _meets(points: dict[int, int], room: int) -> int | None:
    """Return the batch size at which the line through the two points nearest to `room` meets it, None without one."""
    if len(points) < 2:
        return None
    first, last = sorted(sorted(points, key=lambda n: abs(points[n] - room))[:2])
    slope = points[last] - points[first]
    return first + (room - points[first]) * (last - first) // slope if slope > 0 else None
