"""What SharedDict, SharedList and SharedStrings have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from memopt import _C
from memopt.data import leaves, passing
from memopt.running.host_memory_limits import available


def build(kind: int, name: str, items: Iterable[Any], *, pickle: bool) -> _C.SharedMemory:
    encode = leaves.encode_or_pickle if pickle else leaves.encode
    free = available()
    limit = 0 if free is None else max(1, free)  # 0 says that there is none
    return _C.shared_build(kind, name, items, encode, limit)


class SharedContainer:
    """Beside the type of the extension's that reads the memory (`_reader`), in whose instances nothing is added."""

    __slots__ = ()
    _reader: type[_C.SharedItems] | type[_C.SharedMapping]

    if TYPE_CHECKING:

        @property
        def _memory(self) -> _C.SharedMemory: ...
        def __len__(self) -> int: ...

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        passing.register(cls)

    @classmethod
    def _of(cls, memory: _C.SharedMemory) -> Self:
        made: Self = cls._reader.__new__(cls, memory, leaves.decode)  # type: ignore[type-var]
        return made

    def _whole(self) -> Self:
        """The same with a memory of just what is in it."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory that this is in, or a slice of."""
        return len(self._memory)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nobody can change it

    def __reduce__(self) -> tuple[Any, ...]:
        return passing.by_content(self)
