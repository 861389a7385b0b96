"""Device memory: the allocator that torch can be given, and what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt import _C, torch_version

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator

__all__ = ["allocator", "memory_stats"]

_allocator: CUDAPluggableAllocator | None = None


def allocator() -> CUDAPluggableAllocator:
    """memopt's allocator, for `torch.cuda.memory.change_current_allocator`:

        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

    It must come before the first CUDA allocation of the process, and cannot be undone: torch's rules. In this version
    each request is one allocation of the driver and each free gives it back at once (which waits for the device).
    A request that does not fit raises torch.OutOfMemoryError.

    Returns a torch.cuda.memory.CUDAPluggableAllocator, the same one each time.
    Raises ImportError without PyTorch >= 2.10, memopt.Error naming what this torch or the driver lacks; torch is as it
    was then."""
    global _allocator
    if _allocator is None:
        torch_version.require("memopt.cuda.allocator()")
        from torch.cuda.memory import CUDAPluggableAllocator

        _C.allocator_prepare()
        if not _C.cuda_driver()["devices"]:
            raise _C.Error("memopt.cuda.allocator() needs a CUDA device, and the driver sees none")
        _allocator = CUDAPluggableAllocator(_C.__file__, "memopt_malloc", "memopt_free")
    return _allocator


def memory_stats(device: int = 0) -> dict[str, int]:
    """What memopt's allocator did on a device so far, in this process.

    allocations, frees: calls that succeeded; live_blocks, live_bytes, peak_bytes: what was asked for and not yet freed
    (bytes), and the most of it at any time; out_of_memory: requests that did not fit; failed_frees: frees that the
    driver refused. All 0 where the allocator was never used."""
    return _C.allocator_stats(device)
