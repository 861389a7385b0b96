from __future__ import annotations

from collections.abc import Iterable
from typing import Self, TypeVar

from memopt.data.shared_container import build
from memopt.data.shared_sequence import SharedSequence

T = TypeVar("T", covariant=True)


class SharedList(SharedSequence[T]):
    """A list in memory that worker processes share: `dataset.samples = memopt.data.SharedList(dataset.samples)`.

    Reading a plain list's objects writes to their reference counts, and so copies them, page by page, into each worker
    process. Here they are bytes, and each read makes the item anew: two reads of an item give equal objects, not the
    same, and changing one changes nothing here. It reads as the list does (index, slice, iteration, `in`, index(),
    count(), ==); a slice is a view.

    items: any iterable; it is read once, front to back, so that of a generator one item exists at a time. While it is
    read this takes 3 MiB beside the result, and what the item itself takes. An item is None, a bool, int, float,
    complex, str, bytes, bytearray, or a tuple, list, dict, set or frozenset of such, to a depth of 200; a NumPy array
    or scalar; a dense tensor of torch's on the CPU. Arrays and tensors are views, aligned to 64 bytes, which keep the
    memory alive: arrays read-only; a tensor can be written to, and what is written stays in the process that wrote it.

    pickle: keep anything else as a pickle, which each read loads; without it that is a TypeError, which names the
    place.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it goes as a file
    descriptor, at no cost; pickled elsewhere it carries its content. The memory has no name: it is gone with the last
    process that uses it, however that ends. It does not count in /dev/shm, but in a container's memory.

    Raises TypeError or ValueError, naming item and place, for what cannot be shared; OSError where the memory for it is
    not there. For str alone SharedStrings is smaller and faster. Take one from nobody you would not take a pickle from:
    what lies in it may say that it is one."""

    __slots__ = ()
    _kind = 2

    def __new__(cls, items: Iterable[T] = (), /, *, pickle: bool = False) -> Self:
        return cls._of(build(cls._kind, cls.__name__, items, pickle=pickle))
