"""A tensor on a card that a process of an estimated script receives from another.

It lies beside the allocator's memory, in memory that is not counted here because it is the sender's. Its values are
unknown.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Any

import torch

from memopt.sim import _activation

received: Counter[int] = Counter()  # bytes, by device


def install() -> None:
    storage: Any = torch.UntypedStorage
    storage._share_cuda_ = _share
    storage._new_shared_cuda = classmethod(_receive)
    storage._release_ipc_counter_cuda = classmethod(lambda *_: None)


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    handle = f"{os.getpid()} {storage.data_ptr()} {storage.nbytes()}".encode()
    return storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False


def _receive(kind: Any, device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
    place = torch.device("cuda", device)
    if not size:
        return torch.UntypedStorage(0, device=place)
    at = ctypes.c_uint64()
    with torch.cuda.device(place):
        torch.cuda.current_stream().synchronize()  # the device has its context
        status = ctypes.CDLL(str(_activation.libraries() / "sim_cuda.so")).cuMemAlloc_v2(
            ctypes.byref(at), ctypes.c_size_t(size)
        )
    if status:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Another process's tensor of {size} bytes has no place"
        )
    received[device] += size
    return torch._C._construct_storage_from_data_pointer(at.value, place, size)  # type: ignore[no-any-return]
