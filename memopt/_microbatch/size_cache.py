"""The sizes that a step has had memory for, by the shape of its input, and so those to try next."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from memopt._microbatch import available_memory as rooms
from memopt._runtime.log import logger

Shapes = tuple[tuple[tuple[int, ...], str], ...]  # of each tensor: the shape of one sample, the dtype

HEADROOM = 1 / 16
"""The part of the room that a size must leave by estimate: what fragmentation, a workspace or a longer last layer may
take more of than before."""

_TIGHT = (
    1 / 32
)  # of the room: a size that left no more than that is not tried again while the room is no larger
_THRASHES = 2  # steps in a row in which the allocator had to empty its cache


@dataclass
class Record:
    """The knowledge of one shape.

    failed: the room, by size, up to which that size is not tried again. fits: the least room that a size was seen to do
    with. taken: a size, and the bytes it took. mistaken: the least size that was tried by estimate, and failed.
    checked: the samples whose loss could be checked.
    """

    failed: dict[int, int] = field(default_factory=dict)
    fits: dict[int, int] = field(default_factory=dict)
    taken: tuple[int, int] | None = None
    mistaken: int | None = None
    checked: int | None = None
    thrashed: int = 0

    def estimate(self, size: int) -> float | None:
        """The bytes of so many samples.

        Activations grow with the samples, what else there is does not: so for more samples than were seen it is an
        upper bound.
        """
        return None if self.taken is None else self.taken[1] * max(size / self.taken[0], 1.0)

    def is_expected(self, size: int, room: int) -> bool:
        """To fit, by estimate."""
        bytes_ = self.estimate(size)
        wrong = self.mistaken is not None and size >= self.mistaken
        return bytes_ is not None and not wrong and bytes_ <= room * (1 - HEADROOM)

    def has_failed(self, size: int, room: int, asked: int | None) -> None:
        """room: what there was for the step. It is tried again where there is more by what it asked for last."""
        if self.is_expected(size, room):
            self.mistaken = min(size, self.mistaken or size)
        self._block(size, room, room + (asked or 0) + int(room * HEADROOM))
        self.fits = {fit: least for fit, least in self.fits.items() if fit < size or least > room}

    def has_fitted(self, size: int, room: int, taken: rooms.StepMemory | None, was_empty: bool) -> None:
        """Note a size that has fitted.

        taken: by all its micro-batches, as far as it is known. was_empty: nothing was cached before them.
        """
        for failed, most in self.failed.items():
            if failed <= size:
                self.failed[failed] = min(most, room - 1)
        self.fits[size] = min(room, self.fits.get(size, room))
        if taken is None:
            return
        self.thrashed = self.thrashed + 1 if taken.retries else 0
        if was_empty:
            self.taken = (size, taken.live)
        tight = was_empty and taken.live > room * (1 - _TIGHT)
        if size > 1 and (tight or self.thrashed >= _THRASHES):
            logger.info("micro-batches of %d samples leave too little room: fewer from now on", size)
            self.thrashed = 0
            self._block(size, room, room + int(room * HEADROOM))
            del self.fits[size]
            self.fits.setdefault(max(1, size * 3 // 4), room)

    def _block(self, size: int, room: int, most: int) -> None:
        self.failed[size] = max(most, self.failed.get(size, 0))


class KnownSizes:
    """Records by what is run and by shape. A shape of which nothing is known takes over what smaller ones could not."""

    def __init__(self) -> None:
        self._records: dict[Hashable, dict[Shapes, Record]] = {}

    def record(self, what: Hashable, shapes: Shapes) -> Record:
        return self._records.setdefault(what, {}).setdefault(shapes, Record())

    def is_unlimited(self, what: Hashable) -> bool:
        """Nothing it was ever given has failed."""
        return what not in self._records

    def choose(self, what: Hashable, shapes: Shapes, samples: int, room: int) -> int:
        """The most samples a micro-batch should have: all of them where nothing speaks against it."""
        limit = self._limit(what, shapes, samples, room)
        return math.ceil(samples / math.ceil(samples / limit))  # as even as can be

    def _limit(self, what: Hashable, shapes: Shapes, samples: int, room: int) -> int:
        known = self._records.get(what, {})
        own = known.get(shapes, Record())
        failed = dict(own.failed)
        for _, record in self._of_smaller(known, shapes):
            for size, most in record.failed.items():
                failed[size] = max(most, failed.get(size, 0))
        blocked = min((size for size, most in failed.items() if most >= room), default=None)
        if blocked is None:
            held = [size for size, least in own.fits.items() if least <= room <= least * (1 + HEADROOM)]
            if held and not own.is_expected(samples, room):
                return min(samples, max(held))  # in this room: what was not tried may be too much
            return min(samples, self._by_larger(known, shapes, samples, room))
        if own.is_expected(samples, room):
            return samples
        fits = [size for size, least in own.fits.items() if size < blocked and least <= room]
        limit = max(fits, default=max(1, blocked // 2))
        while limit + 1 < blocked and own.is_expected(limit + 1, room):
            limit += 1
        return min(samples, limit)

    def _by_larger(self, known: dict[Shapes, Record], shapes: Shapes, samples: int, room: int) -> int:
        """An estimate for a new shape beside larger ones that had to be cut: a part of their bytes, in proportion."""
        limit = samples
        for larger, record in known.items():
            if (
                larger == shapes
                or record.taken is None
                or not record.failed
                or not _is_within(shapes, larger)
            ):
                continue
            size, taken = record.taken
            a_sample = taken / size * _elements(shapes) / max(1, _elements(larger))
            limit = min(limit, max(size, int(room * (1 - HEADROOM) / max(a_sample, 1.0))))
        return max(1, limit)

    def _of_smaller(self, known: dict[Shapes, Record], shapes: Shapes) -> Iterator[tuple[Shapes, Record]]:
        return (
            (other, record)
            for other, record in known.items()
            if other != shapes and _is_within(other, shapes)
        )


def _is_within(one: Shapes, other: Shapes) -> bool:
    """True for a shape of the same form that is nowhere larger."""
    return len(one) == len(other) and all(
        len(a) == len(b) and kind == like and all(x <= y for x, y in zip(a, b, strict=True))
        for (a, kind), (b, like) in zip(one, other, strict=True)
    )


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape, _ in shapes)
