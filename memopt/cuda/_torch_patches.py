"""torch's allocator statistics, answered by memopt's allocator while it is torch's current one.

torch.cuda.memory_allocated() and its variants call functions of torch._C that have no figures for a pluggable
allocator. install() replaces them, and remove() restores them. Each replacement forwards its arguments to torch's
original, and returns or raises what that does, unless torch allocates through memopt. Code that has imported such a
name before, or has replaced it, therefore sees no difference.

A call that memopt's allocator does not support is refused here, before torch has done half of it, with a message that
names an alternative.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from memopt import _C
from memopt._runtime.log import logger, stacklevel
from memopt.cuda import _history, _statistics

if TYPE_CHECKING:
    import torch


class _PatchedName(NamedTuple):
    """A name that is replaced: owner.name; answer(original, *arguments) is called in its place."""

    owner: Any
    name: str
    answer: Callable[..., Any]
    always: bool = False  # not only while torch allocates through memopt


class _Installed(NamedTuple):
    place: _PatchedName
    ours: Any
    before: Any  # what stood there: in a class the descriptor, not what it gives
    inherited: bool  # the owner had no such name of its own


_lock = threading.Lock()
_installed: list[_Installed] = []
_given: object = None  # torch's object for memopt's allocator


def install(allocator: object) -> None:
    """Answer torch's names from now on, wherever `allocator` is torch's current one. A second call does nothing.

    allocator: memopt's, as torch knows it, which is what CUDAPluggableAllocator.allocator() returns.
    """
    global _given
    with _lock:
        _given = allocator
        if _installed:
            return
        for place in _places():
            if not hasattr(place.owner, place.name):
                continue  # not in this version of torch
            original = getattr(place.owner, place.name)
            ours = _forwarding(place, original)
            before = inspect.getattr_static(place.owner, place.name)
            inherited = inspect.isclass(place.owner) and place.name not in vars(place.owner)
            setattr(place.owner, place.name, ours)
            _installed.append(_Installed(place, ours, before, inherited))
        logger.info(
            "torch functions answered by memopt: %s", ", ".join(done.place.name for done in _installed)
        )


def remove() -> None:
    """Restore torch's originals.

    A name that other code has replaced since stays as it is; calls that reach ours through it are forwarded.
    """
    with _lock:
        for done in reversed(_installed):
            owner, name = done.place.owner, done.place.name
            if inspect.getattr_static(owner, name) is not done.ours:
                continue
            if done.inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, done.before)
        _installed.clear()


def is_ours() -> bool:
    """Return whether torch allocates through memopt, or will from the first use of CUDA on, with patched statistics."""
    if not _installed:
        return False
    import torch

    return bool(_C.allocator_is_current()) or torch._C._cuda_getAllocator() is _given


def _forwarding(place: _PatchedName, original: Any) -> Any:
    def forwarding(*arguments: Any, **named: Any) -> Any:
        if _installed if place.always else is_ours():
            return place.answer(original, *arguments, **named)
        return original(*arguments, **named)

    # A method of C++ has no attributes to take over.
    functools.update_wrapper(forwarding, original)
    return staticmethod(forwarding) if _is_static(place) else forwarding


def _is_static(place: _PatchedName) -> bool:
    """Return whether the name is in a class, and is called without an instance."""
    return place.name == "_new_shared_cuda"


def _places() -> list[_PatchedName]:
    import torch
    import torch.cuda.memory

    numbers = torch.__version__.split(".")
    version = (int(numbers[0]), int(numbers[1]))
    benchmark = type(torch.backends.cudnn).__dict__["benchmark"]
    answers = _Answers(version)
    graph = torch._C._CUDAGraph
    ends = (
        _PatchedName(graph, "capture_begin", begin_capture),
        _PatchedName(graph, "capture_end", end_capture),
    )
    return [
        *(ends if left_undone() else ()),
        *(
            _PatchedName(torch._C, name, getattr(answers, name))
            for name in vars(_Answers)
            if name[:2] != "__"
        ),
        _PatchedName(torch._C, "_set_cudnn_benchmark", _ignore_benchmark),
        _PatchedName(benchmark, "setter", _ignore_benchmark),
        _PatchedName(torch._C, "_cuda_changeCurrentAllocator", _change_current_allocator, always=True),
        _PatchedName(torch.UntypedStorage, "_share_cuda_", _refusal(_NO_SENDING)),
        _PatchedName(torch.UntypedStorage, "_new_shared_cuda", _refusal(_NO_RECEIVING)),
        _PatchedName(torch.cuda.memory.MemPool, "__init__", _refusal(_NO_MEM_POOL)),
        *(_PatchedName(torch._C, name, _refusal(_NO_GRAPH_TREES)) for name in _GRAPH_TREES),
    ]


# ---- what is answered ------------------------------------------------------------------------------------------------


class _Answers:
    """Replacements by torch._C's names.

    The first argument is torch's original, which has no figures while these are asked.
    """

    def __init__(self, version: tuple[int, int]) -> None:
        self.version = version

    def _cuda_memoryStats(self, original: Any, device: int) -> dict[str, Any]:
        return _statistics.torch_statistics(_checked(device), self.version)

    def _cuda_resetPeakMemoryStats(self, original: Any, device: int) -> None:
        _C.allocator_reset_peaks(_checked(device))

    def _cuda_resetAccumulatedMemoryStats(self, original: Any, device: int) -> None:
        _C.allocator_reset_accumulated(_checked(device))

    def _accelerator_getDeviceStats(self, original: Any, device: int) -> dict[str, Any]:
        return _statistics.accelerator_statistics(_checked(device))

    _accelerator_resetPeakStats = _cuda_resetPeakMemoryStats
    _accelerator_resetAccumulatedStats = _cuda_resetAccumulatedMemoryStats

    def _accelerator_isAllocatorInitialized(self, original: Any) -> bool:
        return bool(_C.allocator_is_current())

    def _accelerator_emptyCache(self, original: Any) -> None:
        import torch

        torch._C._cuda_emptyCache()

    def _cuda_getMemoryFraction(self, original: Any, device: int) -> float:
        return _C.allocator_fraction(_checked(device))

    def _cuda_memorySnapshot(
        self, original: Any, mempool_id: tuple[Any, ...] | None = None
    ) -> dict[str, Any]:
        pool, traces = _pool_asked_for(mempool_id)
        snapshot = {
            "segments": _statistics.memory_snapshot(pool),
            "device_traces": _history.traces(self.version) if traces else [],
            "allocator_settings": _allocator_settings(self.version),
            "external_annotations": [],
        }
        if self.version >= (2, 14):
            snapshot["host_segments"] = []
            snapshot["host_traces"] = []
        return snapshot

    def _cuda_attach_out_of_memory_observer(self, original: Any, observer: Observer) -> None:
        import torch

        torch.cuda.init()
        attach_observer(observer)

    def _cuda_cudaCachingAllocator_enable(self, original: Any, value: bool) -> None:
        if not value:
            raise RuntimeError(_NO_UNCACHED)

    def _cuda_cudaCachingAllocator_is_enabled(self, original: Any) -> bool:
        return True

    def _cuda_setMemoryMetadata(self, original: Any, metadata: str) -> None:
        if metadata:
            raise RuntimeError(_NO_METADATA)

    def _cuda_getMemoryMetadata(self, original: Any) -> str:
        return ""

    def _cuda_isHistoryEnabled(self, original: Any) -> bool:
        return _history.is_recording()

    def _cuda_allocationTraceback(self, original: Any, address: int) -> list[dict[str, Any]] | None:
        return _history.traceback_of(address)

    def _cuda_record_memory_history(
        self,
        original: Any,
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool,
        compile_context: bool,
        global_record_annotations: bool,
        skip_actions: Sequence[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        if stacks not in ("python", "all"):
            raise RuntimeError("expected stacks to be 'python', or 'all'")
        _history.refuse_host_history(record_pinned_host_memory)
        if record_cuda:
            _history.record(enabled, context, max_entries, clear_history, skip_actions)

    def _cuda_record_memory_history_legacy(
        self,
        original: Any,
        enabled: bool,
        record_context: bool,
        trace_alloc_max_entries: int,
        trace_alloc_record_context: bool,
        record_context_cpp: bool,
        clear_history: bool,
        compile_context: bool,
        global_record_annotations: bool,
        skip_actions: Sequence[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        _history.refuse_host_history(record_pinned_host_memory)
        if record_cuda:
            context = "alloc" if record_context or trace_alloc_record_context else None
            state = "all" if enabled else None
            _history.record(state, context, trace_alloc_max_entries, clear_history, skip_actions)


def _checked(device: object) -> int:
    """Return the device index. Raise torch's RuntimeError for what is not a device."""
    import torch

    if not isinstance(device, int):
        raise RuntimeError("invalid argument to memory_allocated")
    if not 0 <= device < torch.cuda.device_count():
        raise RuntimeError(f"Invalid device argument {device}: did you call init?")
    return device


def _pool_asked_for(mempool_id: object) -> tuple[tuple[int, int] | None, bool]:
    """Return the pool (None: all) and whether traces are wanted; refuse other arguments as torch does."""
    if mempool_id is None:
        return None, True
    if not isinstance(mempool_id, tuple):
        raise RuntimeError("Expected tuple or None")
    if len(mempool_id) not in (2, 3):
        raise RuntimeError("Expected tuple of size 2 or 3")
    if not all(isinstance(number, int) for number in mempool_id[:2]):
        raise RuntimeError("mempool_id elements must be integers")
    if not isinstance(mempool_id[-1], bool) and len(mempool_id) == 3:
        raise RuntimeError("include_traces must be a boolean")
    pool = (mempool_id[0], mempool_id[1])
    return None if pool == (0, 0) else pool, mempool_id[2] if len(mempool_id) == 3 else True


def _allocator_settings(version: tuple[int, int]) -> dict[str, Any]:
    """Return torch's keys with memopt's fixed values: blocks are split, segments grow, sizes are not rounded."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        or os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        **({"max_round_threshold": -1, "max_cached_size": -1} if version >= (2, 12) else {}),
        "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
    }


# ---- what is refused, or ignored -------------------------------------------------------------------------------------

_NO_MEM_POOL = (
    "torch.cuda.MemPool works with torch's own allocator only. With memopt's, use memopt.cuda.CudaPool: "
    "`with memopt.cuda.CudaPool(): ...`"
)
_NO_IPC = (
    "under memopt's allocator: its memory consists of pieces for which CUDA IPC has no handles. Send tensor.cpu(), "
    "or keep torch's own allocator in this process"
)
_NO_SENDING = f"CUDA tensors cannot be sent to another process {_NO_IPC}"
_NO_RECEIVING = f"CUDA tensors cannot be received from another process {_NO_IPC}"
_NO_UNCACHED = (
    "memopt's allocator always keeps freed memory for the next request: torch.cuda.caching_allocator_enable(False) "
    "works with torch's own allocator only. To return memory, use torch.cuda.empty_cache() or memopt.cuda.trim(); to "
    "see each request at the driver, keep torch's own allocator and set PYTORCH_NO_CUDA_MEMORY_CACHING=1"
)
_NO_METADATA = (
    "memopt's allocator keeps no metadata of blocks. To see in a snapshot where a block comes from, record stacks: "
    "torch.cuda.memory._record_memory_history(stacks='python')"
)
_NO_GRAPH_TREES = (
    "torch.compile's CUDA graph trees need torch's own allocator. With memopt's, set "
    "torch._inductor.config.triton.cudagraph_trees = False (plain CUDA graphs, which work), or compile without "
    "mode='reduce-overhead'"
)
_GRAPH_TREES = ("_cuda_getCheckpointState", "_cuda_setCheckpointPoolState", "_cuda_checkPoolLiveAllocations")
_NO_BENCHMARK = (
    "torch.backends.cudnn.benchmark remains False: cuDNN's search queries the cached memory of torch's own "
    "allocator, which memopt's cannot report; cuDNN's heuristics choose the convolution algorithms"
)


def _refusal(text: str) -> Callable[..., Any]:
    def refuse(original: Any, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(text)

    return refuse


_told_of_benchmark = False


def _ignore_benchmark(original: Any, wanted: bool) -> None:
    """Warn once and go on: results do not depend on the setting, and scripts set it at their top."""
    global _told_of_benchmark
    if wanted and not _told_of_benchmark:
        _told_of_benchmark = True
        warnings.warn(_NO_BENCHMARK, RuntimeWarning, stacklevel=stacklevel())
    original(False if isinstance(wanted, bool) else wanted)  # what is no flag is torch's to refuse


def _change_current_allocator(original: Any, allocator: object) -> None:
    original(allocator)
    import torch

    if allocator is _given and torch._C._get_cudnn_benchmark():
        torch._C._set_cudnn_benchmark(True)  # ours by now: it says what becomes of that


# ---- out-of-memory observers -----------------------------------------------------------------------------------------


Observer = Callable[[int, int, int, int], object]

_observers: list[Observer] = []


def attach_observer(observer: Observer) -> None:
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
    _C.allocator_observe(_tell_observers)


def _tell_observers(device: int, wanted: int, total: int, free: int) -> None:
    for observer in tuple(_observers):
        try:
            observer(device, wanted, total, free)
        except Exception:
            logger.exception("the out-of-memory observer %r failed", observer)


# ---- graph captures that failed --------------------------------------------------------------------------------------
# Cleanup after a CUDA graph capture that failed, where torch leaves it undone.
#
# After an operation that no capture allows (a synchronization), capture_end() of older torch raises before it ends the
# capture's private pool, and the graph releases the pool only after a success. The pool's memory is then held for ever,
# and torch's filter, which lives in the graph, is asked about each request even after the graph is destroyed. torch's
# own allocator has the same fault; torch 2.15 has fixed it. On the older versions known to need it, the pool of each
# capture is noted here and released when the capture fails. Other versions are left alone: a second release would give
# a shared pool away under its other graphs. Captures that Python does not begin and end are torch's, as before.


# By version, as measured: test_allocator_graphs.py fails with one that needs it and is not here.
_LEFT_UNDONE = {
    "2.10.0": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
    "2.11.0": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
    "2.13.0": ("_cuda_releasePool",),
}


class _Capture(NamedTuple):
    stream: torch.cuda.Stream
    pool: tuple[int, int]


_captures: WeakKeyDictionary[Any, _Capture] = WeakKeyDictionary()


def left_undone() -> tuple[str, ...]:
    """The functions of torch._C that this torch does not call for a capture that failed."""
    import torch

    return _LEFT_UNDONE.get(torch.__version__.partition("+")[0], ())


def begin_capture(original: Any, graph: Any, pool: Any = None, *rest: Any, **named: Any) -> None:
    """Replacement of _CUDAGraph.capture_begin that gives each capture a pool.

    Without one, torch makes up a pool, and tells its number only after a capture that succeeded.
    """
    import torch

    if pool is None or tuple(pool) == (0, 0):
        pool = torch.cuda.graph_pool_handle()
    original(graph, pool, *rest, **named)
    _captures[graph] = _Capture(torch.cuda.current_stream(), (pool[0], pool[1]))


def end_capture(original: Any, graph: Any) -> None:
    """Replacement of _CUDAGraph.capture_end."""
    try:
        original(graph)
    except RuntimeError:
        _give_up(graph)
        raise
    _captures.pop(graph, None)


def _give_up(graph: Any) -> None:
    import torch

    capture = _captures.get(graph)
    if capture is None or torch.cuda.current_stream() != capture.stream:
        return  # asked on another stream: torch refuses that before it does anything, and may be asked again
    if torch.cuda.is_current_stream_capturing():
        return  # it goes on: CUDA has it end in the thread that began it
    del _captures[graph]
    if not _releases_its_pool(graph):
        for name in left_undone():
            getattr(torch._C, name)(capture.stream.device.index, capture.pool)


def _releases_its_pool(graph: Any) -> bool:
    """Return whether the capture succeeded but its instantiation failed: torch then releases its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
