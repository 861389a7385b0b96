"""Device memory: the allocator that torch can be given, and what it knows."""

from memopt.cuda.current_allocator import allocator, trim
from memopt.cuda.pool import CudaPool
from memopt.cuda.statistics import fragmentation, memory_snapshot, memory_stats
from memopt.cuda.tracing import record_trace, save_trace, stop_trace, trace_step

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
