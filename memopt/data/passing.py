"""Shared containers on their way to other processes: to those that multiprocessing starts or talks to goes the memory's
descriptor, whatever its size; anywhere else (a file, a checkpoint) goes the content."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Protocol

from memopt import _C

_Range = tuple[int, int, int] | None  # start, step, length of a slice


class Shared(Protocol):
    @property
    def _memory(self) -> _C.SharedMemory: ...

    @classmethod
    def _of(cls, memory: _C.SharedMemory) -> Any: ...


def register(kind: type[Shared]) -> None:
    """Instances of exactly this class go by descriptor."""
    ForkingPickler.register(kind, _by_descriptor)


def by_content(shared: Any) -> tuple[Any, ...]:
    """What __reduce__ answers."""
    return _from_content, (type(shared), bytes(shared._whole()._memory))


def _by_descriptor(shared: Any) -> tuple[Any, ...]:
    # The memory is an object of its own in the pickle: what is in one goes in one.
    return _from_memory, (type(shared), shared._memory, getattr(shared, "_range", None))


def _memory_by_descriptor(memory: _C.SharedMemory) -> tuple[Any, ...]:
    return _received, (DupFd(memory.fileno()),)


def _received(handle: Any) -> _C.SharedMemory:
    return _C.SharedMemory(handle.detach())


def _from_content(kind: type[Shared], content: bytes) -> Any:
    return kind._of(_C.shared_copy(content))


def _from_memory(kind: type[Shared], memory: _C.SharedMemory, part: _Range) -> Any:
    whole = kind._of(memory)
    if part is None or part == (0, 1, len(whole)):
        return whole
    start, step, length = part
    stop = start + step * length
    return whole[start : stop if stop >= 0 else None : step] if length else whole[:0]


ForkingPickler.register(_C.SharedMemory, _memory_by_descriptor)
