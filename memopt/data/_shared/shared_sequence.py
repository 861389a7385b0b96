"""memopt.data.SharedList and SharedStrings: sequences in memory that worker processes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from memopt import _C
from memopt.data._shared import array_codec
from memopt.data._shared.shared_container import SharedContainer, build

T = TypeVar("T", covariant=True)
_SHOWN = 3  # items of a repr


class SharedSequence(SharedContainer, _C.SharedItems, Sequence[T]):
    """A sequence in shared memory; its classes say of what."""

    __slots__ = ()
    _reader = _C.SharedItems
    _kind: int  # of the memory: 1 strings, 2 values

    def _whole(self) -> Self:
        if self._range == _C.SharedItems(self._memory, array_codec.decode)._range:
            return self
        return self._of(build(self._kind, type(self).__name__, self, pickle=True))

    if TYPE_CHECKING:  # C's own are faster than a call of Python's

        def __iter__(self) -> Iterator[T]: ...
        @overload
        def __getitem__(self, index: int, /) -> T: ...
        @overload
        def __getitem__(self, index: slice, /) -> Self: ...
        def __getitem__(self, index: Any, /) -> Any: ...

    def __reversed__(self) -> Iterator[T]:
        return iter(self[::-1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | SharedSequence):
            return NotImplemented
        return len(self) == len(other) and all(a is b or a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other] if isinstance(other, list | SharedSequence) else NotImplemented

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            count, size = len(self), _C.format_size(self.nbytes)
        except ValueError:
            return f"{name}(closed)"
        shown = [repr(item) for item in islice(self, _SHOWN)] + ["…"] * (count > _SHOWN)
        return f"{name}([{', '.join(shown)}], {count} item{'s' * (count != 1)}, {size})"


class SharedList(SharedSequence[T]):
    """A list in memory that worker processes share.

    Reading a plain list's objects writes to their reference counts, and so copies them, page by page, into each worker
    process. Here they are bytes, and each read makes the item anew: two reads of an item give equal objects, not the
    same one, and changing one changes nothing here. It reads as the list does (index, slice, iteration, `in`,
    `index()`, `count()`, `==`); a slice is a view.

    An item is None, a bool, int, float, complex, str, bytes, bytearray, or a tuple, list, dict, set or frozenset of
    such, to a depth of 200; a NumPy array or scalar; a dense torch tensor on the CPU. Arrays and tensors are views,
    aligned to 64 bytes, which keep the memory alive. Arrays are read-only; a tensor can be written to, and what is
    written stays in the process that wrote it. For str alone SharedStrings is smaller and faster.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it goes as a file
    descriptor, at no cost; pickled elsewhere it carries its content. The memory has no name: it is gone with the last
    process that uses it, however that ends. It does not count in /dev/shm, but in a container's memory. Take one only
    from processes that you would take a pickle from: its content may say that it is one.

    Args:
        items: Any iterable. It is read once, front to back, so that of a generator one item exists at a time. Building
            takes 3 MiB beside the result and the current item.
        pickle: Keep other objects as pickles, which each read loads.

    Raises:
        TypeError: An item cannot be shared. The error names the item and the place in it.
        ValueError: An item is nested too deeply, or contains itself.
        OSError: The memory is not available.

    Example:
        >>> dataset.samples = memopt.data.SharedList(dataset.samples)
    """

    __slots__ = ()
    _kind = 2

    def __new__(cls, items: Iterable[T] = (), /, *, pickle: bool = False) -> Self:
        return cls._of(build(cls._kind, cls.__name__, items, pickle=pickle))


class SharedStrings(SharedSequence[str]):
    """A list of str in memory that worker processes share.

    A str of a plain list carries a reference count, and a worker that reads it writes to it: page after page of the
    list is copied into each worker. Here a str is its UTF-8 bytes and 4 (beyond 4 GiB: 8) bytes for its place; each
    read makes it anew. It reads as the list does (index, slice, iteration, `in`, `index()`, `count()`, `==`); a slice
    is a view. It cannot be changed. Surrogates are kept; an instance of a subclass of str comes back as a str.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it goes as a file
    descriptor, at no cost; pickled elsewhere it carries its content. The memory has no name: it is gone with the last
    process that uses it, however that ends. It does not count in /dev/shm, but in a container's memory.

    Args:
        strings: Any iterable. It is read once, front to back, so a generator's strings never exist all at once.
            Building takes 3 MiB beside the result.

    Raises:
        TypeError: An item is not a str. The error names it.
        OSError: The memory is not available.

    Example:
        >>> dataset.paths = memopt.data.SharedStrings(dataset.paths)
    """

    __slots__ = ()
    _kind = 1

    def __new__(cls, strings: Iterable[str] = (), /) -> Self:
        return cls._of(build(cls._kind, cls.__name__, strings, pickle=False))
