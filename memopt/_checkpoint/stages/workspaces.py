"""Workspaces that cuBLAS keeps in torch's allocator, one for each handle and stream."""

from __future__ import annotations

import torch


def workspace_bytes(device: torch.device) -> int:
    """Return the bytes of cuBLAS's workspaces on a CUDA device so far, 0 on another.

    It frees them all, since their sizes can be read nowhere; the next product takes them again. The forward pass has
    one and, as it runs on another thread, the backward pass too: 8 MiB each by default, 32 MiB on Hopper
    (CUBLAS_WORKSPACE_CONFIG).
    """
    if device.type != "cuda":
        return 0
    before: int = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    after: int = torch.cuda.memory_allocated(device)
    return before - after
