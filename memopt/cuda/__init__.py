"""Device memory: the allocator that torch can be given, and what it knows."""

from memopt.cuda.current_allocator import allocator, memory_stats, trim

__all__ = ["allocator", "memory_stats", "trim"]
