"""Base of SharedDict, SharedList and SharedStrings, and its reductions for multiprocessing.

To processes that multiprocessing starts or talks to goes the memory's descriptor, whatever its size; anywhere else (a
file, a checkpoint) goes the content."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any, Self

from memopt import _C
from memopt._runtime.host_memory import available
from memopt.data._shared import array_codec


def build(kind: int, name: str, items: Iterable[Any], *, pickle: bool) -> _C.SharedMemory:
    encode = array_codec.encode_or_pickle if pickle else array_codec.encode
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
        ForkingPickler.register(cls, _by_descriptor)  # instances of exactly this class

    @classmethod
    def _of(cls, memory: _C.SharedMemory) -> Self:
        made: Self = cls._reader.__new__(cls, memory, array_codec.decode)  # type: ignore[type-var]
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
        return _from_content, (type(self), bytes(self._whole()._memory))


def _by_descriptor(shared: Any) -> tuple[Any, ...]:
    # The memory is an object of its own in the pickle: what is in one goes in one.
    return _from_memory, (type(shared), shared._memory, getattr(shared, "_range", None))


def _memory_by_descriptor(memory: _C.SharedMemory) -> tuple[Any, ...]:
    return _received, (DupFd(memory.fileno()),)


def _received(handle: Any) -> _C.SharedMemory:
    return _C.SharedMemory(handle.detach())


def _from_content(kind: type[SharedContainer], content: bytes) -> Any:
    return kind._of(_C.shared_copy(content))


def _from_memory(
    kind: type[SharedContainer], memory: _C.SharedMemory, part: tuple[int, int, int] | None
) -> Any:
    whole: Any = kind._of(memory)
    if part is None or part == (0, 1, len(whole)):
        return whole
    start, step, length = part
    stop = start + step * length
    return whole[start : stop if stop >= 0 else None : step] if length else whole[:0]


ForkingPickler.register(_C.SharedMemory, _memory_by_descriptor)
