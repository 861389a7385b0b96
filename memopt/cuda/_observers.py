"""Out-of-memory observers: the callbacks given to torch._C._cuda_attach_out_of_memory_observer."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from memopt import _C
from memopt._runtime.log import logger

Observer = Callable[[int, int, int, int], object]

_observers: list[Observer] = []


def attach(observer: Observer) -> None:
    """Call observer(device, requested, total, free) before each torch.OutOfMemoryError is raised; all sizes are bytes.

    Observers run in the order in which they were attached, in the thread of the request, which may hold any lock of the
    program but none of memopt's. A request that fails within an observer calls none. An exception in an observer is
    logged, and the out-of-memory error is raised all the same. An observer cannot be detached: that is torch's rule.
    """
    if not callable(observer):
        raise TypeError(f"{observer!r} cannot be called: an out-of-memory observer takes four ints")
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
