"""A simulated CUDA device under PyTorch's own CUDA build: no GPU, no driver, the same allocator, streams and graphs.

Kernels compute nothing, unless an op runs under Compute or its kernel has a host body (emulate). csrc/simcuda/ says
what is simulated, and how far it can be trusted. The simulated libraries never load into a process that has a real
driver; see activate().

Example:
    >>> import memopt.sim
    >>> memopt.sim.activate(memory="8GiB")  # first: it must come before torch
    >>> import torch
    >>> torch.empty(1 << 20, device="cuda")  # PyTorch's real caching allocator, on host memory
"""

from memopt._runtime.lazy_names import lazy_names
from memopt.sim._activation import activate, is_active, libraries, readiness
from memopt.sim._control import (
    calls,
    clock,
    emulate,
    fail,
    fail_clear,
    lazy,
    missing_calls,
    price,
    progress,
    reset_peak,
    set_memory,
    stats,
    workspace_reads,
)
from memopt.sim._coverage import coverage

__all__ = [
    "Compute",
    "activate",
    "calls",
    "clock",
    "coverage",
    "emulate",
    "fail",
    "fail_clear",
    "is_active",
    "lazy",
    "libraries",
    "missing_calls",
    "price",
    "progress",
    "readiness",
    "reset_peak",
    "set_memory",
    "stats",
    "workspace_reads",
]

# It needs torch, which activate() must precede.
__getattr__, __dir__ = lazy_names(globals(), {"Compute": "memopt.sim._compute"})
