"""What SharedStrings and SharedList have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from memopt import _C
from memopt.data import leaves
from memopt.data.shared_container import SharedContainer, build

T = TypeVar("T", covariant=True)
_SHOWN = 3  # items of a repr


class SharedSequence(SharedContainer, _C.SharedItems, Sequence[T]):
    """A sequence in shared memory; its classes say of what."""

    __slots__ = ()
    _reader = _C.SharedItems
    _kind: int  # of the memory: 1 strings, 2 values

    def _whole(self) -> Self:
        if self._range == _C.SharedItems(self._memory, leaves.decode)._range:
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
