"""What SharedStrings and SharedList have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from memopt import _C
from memopt.data import leaves, passing
from memopt.running.host_memory_limits import available

T = TypeVar("T", covariant=True)
_SHOWN = 3  # items of a repr


def build(kind: int, name: str, items: Iterable[Any], *, pickle: bool) -> _C.SharedMemory:
    encode = leaves.encode_or_pickle if pickle else leaves.encode
    return _C.shared_build(kind, name, items, encode, available() or 0)


class SharedSequence(_C.SharedItems, Sequence[T]):
    """A sequence in shared memory; its classes say of what."""

    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        passing.register(cls)

    @classmethod
    def _of(cls, memory: _C.SharedMemory) -> Self:
        return _C.SharedItems.__new__(cls, memory, leaves.decode)

    def _whole(self) -> Self:
        """The same with a memory of just these items."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory that this is in, or a slice of."""
        return len(self._memory)

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

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nobody can change it

    def __reduce__(self) -> tuple[Any, ...]:
        return passing.by_content(self)

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            count, size = len(self), _C.format_size(self.nbytes)
        except ValueError:
            return f"{name}(closed)"
        shown = [repr(item) for item in islice(self, _SHOWN)] + ["…"] * (count > _SHOWN)
        return f"{name}([{', '.join(shown)}], {count} item{'s' * (count != 1)}, {size})"
