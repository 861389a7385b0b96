"""Cleanup after a CUDA graph capture that failed, where torch leaves it undone.

After an operation that no capture allows (a synchronization), capture_end() of older torch raises before it ends the
capture's private pool, and the graph releases the pool only after a success. The pool's memory is then held for ever,
and torch's filter, which lives in the graph, is asked about each request even after the graph is destroyed. torch's own
allocator has the same fault; torch 2.15 has fixed it. On the older versions known to need it, the pool of each capture
is noted here and released when the capture fails. Other versions are left alone: a second release would give a shared
pool away under its other graphs. Captures that Python does not begin and end are torch's, as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

# By version, as measured: test_allocator_graphs.py fails with one that needs it and is not here.
_LEFT_UNDONE = {
    "2.10.0": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
    "2.11.0": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
    "2.13.0": ("_cuda_releasePool",),
}


class _Capture(NamedTuple):
    stream: torch.cuda.Stream
    pool: tuple[int, int]


_begun: WeakKeyDictionary[Any, _Capture] = WeakKeyDictionary()


def left_undone() -> tuple[str, ...]:
    """The functions of torch._C that this torch does not call for a capture that failed."""
    import torch

    return _LEFT_UNDONE.get(torch.__version__.partition("+")[0], ())


def begin(original: Any, graph: Any, pool: Any = None, *rest: Any, **named: Any) -> None:
    """Replacement of _CUDAGraph.capture_begin that gives each capture a pool.

    Without one, torch makes up a pool, and tells its number only after a capture that succeeded.
    """
    import torch

    if pool is None or tuple(pool) == (0, 0):
        pool = torch.cuda.graph_pool_handle()
    original(graph, pool, *rest, **named)
    _begun[graph] = _Capture(torch.cuda.current_stream(), (pool[0], pool[1]))


def end(original: Any, graph: Any) -> None:
    """Replacement of _CUDAGraph.capture_end."""
    try:
        original(graph)
    except RuntimeError:
        _give_up(graph)
        raise
    _begun.pop(graph, None)


def _give_up(graph: Any) -> None:
    import torch

    capture = _begun.get(graph)
    if capture is None or torch.cuda.current_stream() != capture.stream:
        return  # asked on another stream: torch refuses that before it does anything, and may be asked again
    if torch.cuda.is_current_stream_capturing():
        return  # it goes on: CUDA has it end in the thread that began it
    del _begun[graph]
    if not _releases_its_pool(graph):
        for name in left_undone():
            getattr(torch._C, name)(capture.stream.device.index, capture.pool)


def _releases_its_pool(graph: Any) -> bool:
    """Whether the capture succeeded but its instantiation failed: torch then releases the pool with the graph."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
