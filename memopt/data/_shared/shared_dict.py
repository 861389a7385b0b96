from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from memopt import _C
from memopt.data._shared.shared_container import SharedContainer, build

K = TypeVar("K")
V = TypeVar("V", covariant=True)
_SHOWN = 3  # entries of a repr


class SharedDict(SharedContainer, _C.SharedMapping, Mapping[K, V]):
    """A dict in memory that worker processes share.

    It reads as the dict does (`d[key]`, `get()`, `in`, `keys()`, `values()`, `items()`, iteration in the order of
    insertion, `==`). It cannot be changed. Each read makes the value anew. It goes to other processes as a SharedList
    does. An entry costs its bytes, 8 (beyond 4 GiB: 16) for its places and 11 to 21 in the index.

    Keys are str, int, float, bytes, bool, None and tuples of them; not nan. They are looked up as in a dict, where 1,
    1.0 and True are equal. Values are what the items of a SharedList are.

    Args:
        items: A mapping, or an iterable of pairs, read once, entry by entry. Of equal keys the first one stays, with
            the last value. Building takes 3 MiB beside the result.
        pickle: Keep other values as pickles, which each read loads.

    Raises:
        TypeError: A key or value cannot be shared, or a key that is looked up is not hashable. The error names the
            place.
        ValueError: A value is nested too deeply, or contains itself.
        KeyError: A key that is looked up is not there.
        OSError: The memory is not available.

    Example:
        >>> dataset.boxes = memopt.data.SharedDict(dataset.boxes)
    """

    __slots__ = ()
    _reader = _C.SharedMapping

    def __new__(cls, items: Mapping[K, V] | Iterable[tuple[K, V]] = (), /, *, pickle: bool = False) -> Self:
        pairs = items.items() if isinstance(items, Mapping) else items
        return cls._of(build(3, cls.__name__, pairs, pickle=pickle))

    if TYPE_CHECKING:  # C's own are faster than a call of Python's

        def __getitem__(self, key: K, /) -> V: ...
        @overload
        def get(self, key: object, default: None = None, /) -> V | None: ...
        @overload
        def get(self, key: object, default: Any, /) -> Any: ...
        def get(self, key: object, default: Any = None, /) -> Any: ...

    def __iter__(self) -> Iterator[K]:
        return map(self._key_at, range(len(self)))

    def __reversed__(self) -> Iterator[K]:
        return map(self._key_at, reversed(range(len(self))))

    def keys(self) -> KeysView[K]:
        return KeysView(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict | SharedDict):
            return NotImplemented
        missing = object()
        found = ((value, other.get(key, missing)) for key, value in self.items())
        return len(self) == len(other) and all(a is b or a == b for a, b in found)

    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            count, size = len(self), _C.format_size(self.nbytes)
        except ValueError:
            return f"{name}(closed)"
        shown = [f"{key!r}: {value!r}" for key, value in islice(self.items(), _SHOWN)] + ["…"] * (
            count > _SHOWN
        )
        return f"{name}({{{', '.join(shown)}}}, {count} entr{'y' if count == 1 else 'ies'}, {size})"


class _Items(ItemsView[K, V]):
    """Entry by entry: nothing is looked up."""

    __slots__ = ()
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return map(self._mapping._item_at, range(len(self._mapping)))

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return map(self._mapping._item_at, reversed(range(len(self._mapping))))


class _Values(ValuesView[V]):
    __slots__ = ()
    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        return map(self._mapping._value_at, range(len(self._mapping)))

    def __reversed__(self) -> Iterator[V]:
        return map(self._mapping._value_at, reversed(range(len(self._mapping))))
