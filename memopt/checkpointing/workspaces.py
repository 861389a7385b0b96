"""What cuBLAS keeps for itself of torch's allocator: a workspace for each of its handles and streams."""

from __future__ import annotations

import torch


def workspace_bytes(device: torch.device) -> int:
    """Bytes of cuBLAS's workspaces on a CUDA device so far, 0 on another. It lets go of them all, since their sizes are
    nowhere to be read; the next product takes them again. The forward pass has one and, as it runs on another thread,
    the backward pass too: 8 MiB each where CUBLAS_WORKSPACE_CONFIG says nothing, 32 MiB on Hopper."""
    if device.type != "cuda":
        return 0
    before: int = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    after: int = torch.cuda.memory_allocated(device)
    return before - after
