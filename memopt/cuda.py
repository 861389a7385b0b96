"""Device memory: the allocator that torch can be given, and what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt import _C, torch_version
from memopt.log import logger

if TYPE_CHECKING:
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator

__all__ = ["allocator", "memory_stats"]

_allocator: CUDAPluggableAllocator | None = None


def allocator() -> CUDAPluggableAllocator:
    """memopt's allocator, for `torch.cuda.memory.change_current_allocator`:

        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

    It must come before the first CUDA allocation of the process, and cannot be undone: torch's rules (in a CUDA build
    of torch even training on the CPU counts, where it pins memory or runs autograd). In this version each request is
    one allocation of the driver and each free gives it back at once (which waits for the device). A request that does
    not fit raises torch.OutOfMemoryError; one during a CUDA graph capture, RuntimeError: no memory is kept for graphs.

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
        logger.info("allocator: memopt_malloc and memopt_free of %s", _C.__file__)
    return _allocator


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """What memopt's allocator did on a device so far, in this process. device: as torch.cuda takes it, the current one
    by default.

    allocations, frees: calls that succeeded; live_blocks, live_bytes, peak_bytes: what was asked for and not yet freed
    (bytes), and the most of it at any time; out_of_memory: requests that did not fit; failed_frees: frees that the
    driver refused. All 0 where the allocator was never used. Raises ValueError for what is no CUDA device."""
    if isinstance(device, int):
        index = device
    elif device is None and _allocator is None:
        index = 0  # nothing was ever allocated, so torch need not be asked which device is current
    else:
        import torch

        chosen = torch.device("cuda" if device is None else device)
        if chosen.type != "cuda":
            raise ValueError(f"device {device!r} is no CUDA device")
        # Where CUDA was never used, or cannot be (a forked child), the current device is the first.
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        index = current if chosen.index is None else chosen.index
    return _C.allocator_stats(index)
