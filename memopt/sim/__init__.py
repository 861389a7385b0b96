"""A simulated CUDA device under PyTorch's own CUDA build: no GPU, no driver, the same allocator, streams and graphs.

    import memopt.sim
    memopt.sim.activate(memory="8GiB")     # first: it must come before torch
    import torch
    torch.empty(1 << 20, device="cuda")    # PyTorch's real caching allocator, on host memory

Kernels compute nothing, unless an op runs under Compute or its kernel has a host body (emulate). What is simulated, and
how far it is trusted, is said in csrc/simcuda/. It never loads where a real driver does; see activate().
"""

from memopt.lazy_names import lazy_names
from memopt.sim.activation import activate, is_active, libraries, readiness
from memopt.sim.control import (
    calls,
    emulate,
    fail,
    fail_clear,
    lazy,
    missing_calls,
    progress,
    reset_peak,
    set_memory,
    stats,
    workspace_reads,
)
from memopt.sim.coverage import coverage

__all__ = [
    "Compute",
    "activate",
    "calls",
    "coverage",
    "emulate",
    "fail",
    "fail_clear",
    "is_active",
    "lazy",
    "libraries",
    "missing_calls",
    "progress",
    "readiness",
    "reset_peak",
    "set_memory",
    "stats",
    "workspace_reads",
]

# It needs torch, which activate() must precede.
__getattr__, __dir__ = lazy_names(globals(), {"Compute": "memopt.sim.compute"})
