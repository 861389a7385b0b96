"""Who is told of an out of memory: what was given to torch._C._cuda_attach_out_of_memory_observer."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from memopt import _C
from memopt.log import logger

Observer = Callable[[int, int, int, int], object]

_observers: list[Observer] = []


def attach(observer: Observer) -> None:
    """From now on observer(device, bytes asked for, the device's bytes, its free bytes) is called, after those attached
    before, when torch.OutOfMemoryError is about to be raised: in the thread that asked, which may hold any lock of the
    program's but none of memopt's. A request that fails within an observer tells nobody. What an observer raises is
    logged, and the out of memory comes all the same. It cannot be detached: torch's rule."""
    if not callable(observer):
        raise TypeError(f"an out-of-memory observer is called with four ints, which {observer!r} cannot be")
    if not _observers:
        atexit.register(_C.allocator_observe, None)
    _observers.append(observer)
    _C.allocator_observe(_tell)


def _tell(device: int, wanted: int, total: int, free: int) -> None:
    for observer in tuple(_observers):
        try:
            observer(device, wanted, total, free)
        except Exception:
            logger.exception("the out-of-memory observer %r failed", observer)
