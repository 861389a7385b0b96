from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from memopt.data.shared_container import build
from memopt.data.shared_sequence import SharedSequence


class SharedStrings(SharedSequence[str]):
    """A list of str in memory that worker processes share: `dataset.paths = memopt.data.SharedStrings(dataset.paths)`.

    A str of a plain list carries a reference count, and a worker that reads it writes to it: page after page of the
    list is copied into each worker. Here a str is its UTF-8 bytes and 4 (beyond 4 GiB: 8) bytes for its place; each
    read makes it anew. It reads as the list does (index, slice, iteration, `in`, index(), count(), ==); a slice is a
    view. Nothing can be changed.

    strings: any iterable; it is read once, front to back, so a generator's strings never exist all at once. While it is
    read this takes 3 MiB beside the result. Surrogates are kept. A subclass of str comes back as a str.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it goes as a file
    descriptor, at no cost; pickled elsewhere it carries its content. The memory has no name: it is gone with the last
    process that uses it, however that ends. It does not count in /dev/shm, but in a container's memory.

    Raises TypeError, naming the item, for what is no str; OSError where the memory for it is not there."""

    __slots__ = ()
    _kind = 1

    def __new__(cls, strings: Iterable[str] = (), /) -> Self:
        return cls._of(build(cls._kind, cls.__name__, strings, pickle=False))
