"""Sizes of micro-batches: the memory that there is for a step, and the sizes that it has been enough for.

Sizes that fitted or failed are remembered by the shape of the input, with the memory of then; the next size to try
follows from them and from the memory of now."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from memopt import _C
from memopt._memory.oom.exceptions import bytes_asked
from memopt._runtime.host_memory import address_space_bytes, available
from memopt._runtime.log import logger

Shapes = tuple[tuple[tuple[int, ...], str], ...]  # of each tensor: the shape of one sample, the dtype
HEADROOM = 1 / 16
"""The part of the room that a size must leave by estimate: what fragmentation, a workspace or a longer last layer may
take more of than before."""
_TIGHT = (
    1 / 32
)  # of the room: a size that left no more than that is not tried again while the room is no larger
_THRASHES = 2  # steps in a row in which the allocator had to empty its cache


def available_bytes(devices: Iterable[torch.device]) -> int:
    """Return the bytes that a step can use: of the device that has least, or of the host if there is none."""
    cuda = [device for device in devices if device.type == "cuda"]
    return min(_of_device(device) for device in cuda) if cuda else _of_host()


class StepMemory(NamedTuple):
    """The memory of the CUDA devices together, since memory_before().

    live: bytes in tensors then; retries: how often the allocator had had to empty its cache to serve a request, which
    precedes an out-of-memory error and makes a step slow.
    """

    live: int
    retries: int


def memory_before(devices: Iterable[torch.device]) -> StepMemory | None:
    """Return the memory before a step; None if no allocator counts it: without CUDA, or under one that keeps no
    statistics."""
    stats = _statistics(devices)
    if not stats:
        return None
    live = sum(one.get("allocated_bytes.all.current", 0) for one in stats)
    return StepMemory(live, sum(one.get("num_alloc_retries", 0) for one in stats))


def memory_since(devices: Iterable[torch.device], then: StepMemory) -> StepMemory:
    """Return the bytes held beyond the live ones of memory_before(), and the retries in between.

    The bytes are the memory of the steps in between if nothing was cached before.
    """
    stats = _statistics(devices)
    held = sum(one.get("reserved_bytes.all.current", 0) for one in stats)
    return StepMemory(held - then.live, sum(one.get("num_alloc_retries", 0) for one in stats) - then.retries)


def _statistics(devices: Iterable[torch.device]) -> list[dict[str, int]]:
    found = []
    for device in devices:
        if device.type == "cuda" and _has_statistics():
            found.append(torch.cuda.memory_stats(device))
    return found


def _has_statistics() -> bool:
    """Return whether the allocator has statistics: a pluggable one that is not memopt's has none."""
    return torch.cuda.memory.get_allocator_backend() != "pluggable" or _C.allocator_is_current()


def _of_device(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    if not _has_statistics():
        return int(free)
    reserved, live = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    limit = _limit(device, total)
    return int(min(free, limit - reserved) + reserved - live)


def _limit(device: torch.device, total: int) -> int:
    """Return the bytes of the device that this process may use."""
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # young
    if fraction is None or torch.cuda.memory.get_allocator_backend() == "pluggable":
        return total
    return int(fraction(device) * total)


def _of_host() -> int:
    """Return the free bytes for this process, within its cgroup and its limit of address space."""
    found = [size for size in (available(swap=False), _address_room()) if size is not None]
    return min(found, default=sys.maxsize)


def _address_room() -> int | None:
    limit = _address_limit()
    return None if limit is None else limit - address_space_bytes()


def _address_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def least_memory(error: BaseException, devices: Iterable[torch.device]) -> str:
    """Say how many bytes would have let the request pass. Called while the failed call's tensors are alive."""
    asked = bytes_asked(error) or 0
    for device in devices:
        if device.type == "cuda":
            return _least_of_device(device, asked)
    if (limit := _address_limit()) is not None:
        needed = address_space_bytes() + asked
        return (
            f"at least {_C.format_size(max(needed, limit + 1))} of address space ({max(needed, limit + 1)} bytes; the "
            f"limit, ulimit -v, is {_C.format_size(limit)})"
        )
    return f"at least {_C.format_size(_of_host() + asked)} of host memory beyond what is in use"


def _least_of_device(device: torch.device, asked: int) -> str:
    free, total = torch.cuda.mem_get_info(device)
    needed = total - free + asked
    if needed > total:
        return (
            f"at least {_C.format_size(needed)} of device memory ({needed} bytes: {total - free} in use by all "
            f"processes, and {asked} for the request that failed), but {device} has {_C.format_size(total)}"
        )
    if not _has_statistics():
        return f"{_C.format_size(asked)} more of {device} than this process may use"
    held = torch.cuda.memory_reserved(device)
    return (
        f"at least {_C.format_size(held + asked)} for this process alone ({held + asked} bytes: {held} held and "
        f"{asked} for the request that failed); a limit below the {_C.format_size(total)} of {device} is set"
    )


# ---- what fitted -----------------------------------------------------------------------------------------------------


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
        """Estimate the bytes of so many samples.

        Activations grow with the samples, other memory does not, so for more samples than were seen this is an upper
        bound.
        """
        return None if self.taken is None else self.taken[1] * max(size / self.taken[0], 1.0)

    def is_expected(self, size: int, room: int) -> bool:
        """Return whether the size is expected to fit, by the estimate."""
        bytes_ = self.estimate(size)
        wrong = self.mistaken is not None and size >= self.mistaken
        return bytes_ is not None and not wrong and bytes_ <= room * (1 - HEADROOM)

    def has_failed(self, size: int, room: int, asked: int | None) -> None:
        """Note a failure with the given room.

        The size is tried again when there is more room by the size of the last request."""
        if self.is_expected(size, room):
            self.mistaken = min(size, self.mistaken or size)
        self._block(size, room, room + (asked or 0) + int(room * HEADROOM))
        self.fits = {fit: least for fit, least in self.fits.items() if fit < size or least > room}

    def has_fitted(self, size: int, room: int, taken: StepMemory | None, was_empty: bool) -> None:
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
            logger.info("micro-batches of %d samples leave too little memory: fewer from now on", size)
            self.thrashed = 0
            self._block(size, room, room + int(room * HEADROOM))
            del self.fits[size]
            self.fits.setdefault(max(1, size * 3 // 4), room)

    def _block(self, size: int, room: int, most: int) -> None:
        self.failed[size] = max(most, self.failed.get(size, 0))


class KnownSizes:
    """Records by function and by shape. A shape without a record takes over the failures of smaller shapes."""

    def __init__(self) -> None:
        self._records: dict[Hashable, dict[Shapes, Record]] = {}

    def record(self, what: Hashable, shapes: Shapes) -> Record:
        return self._records.setdefault(what, {}).setdefault(shapes, Record())

    def is_unlimited(self, what: Hashable) -> bool:
        """Return whether nothing has failed for it so far."""
        return what not in self._records

    def choose(self, what: Hashable, shapes: Shapes, samples: int, room: int) -> int:
        """Return the most samples that a micro-batch should have: all of them unless something is known against it."""
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
        """Estimate a new shape from larger ones that had to be split: their bytes, in proportion."""
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
    """Return whether a shape has the same form and is larger in no dimension."""
    return len(one) == len(other) and all(
        len(a) == len(b) and kind == like and all(x <= y for x, y in zip(a, b, strict=True))
        for (a, kind), (b, like) in zip(one, other, strict=True)
    )


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape, _ in shapes)
