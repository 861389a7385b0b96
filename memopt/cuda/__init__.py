"""Device memory: memopt's allocator for torch, memory pools, statistics and traces."""

from memopt._runtime.lazy_names import lazy_names
from memopt.cuda._allocator import allocator, trim
from memopt.cuda._pool import CudaPool
from memopt.cuda._statistics import (
    fragmentation,
    memory_snapshot,
    memory_stats,
    record_trace,
    save_trace,
    stop_trace,
    trace_step,
)

__all__ = [
    "CudaPool",
    "allocator",
    "fragmentation",
    "memory_snapshot",
    "memory_stats",
    "record_trace",
    "save_trace",
    "stop_trace",
    "trace_step",
    "trim",
]

_, __dir__ = lazy_names(globals(), {})
