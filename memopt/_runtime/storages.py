"""The storages of tensors, and their bytes, each counted once, however many views show it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable

import torch

Memory = tuple[str, int, int, torch.Tensor]  # device, address, bytes of a storage, and a tensor on it


def memory_of(tensor: torch.Tensor) -> list[Memory]:
    """Return the storages of a tensor: as a rule, its own.

    A sparse tensor has those of its indices and values; a wrapper those of what it wraps; a fake tensor none.
    """
    found = []
    parts = (tensor,) if type(tensor) in _PLAIN and tensor.layout is torch.strided else parts_of(tensor)
    for part in parts:
        try:
            storage = part.untyped_storage()
            device = storage.device
            if device.type != "meta" and (nbytes := storage.nbytes()) and (address := storage.data_ptr()):
                found.append((_named(device), address, nbytes, part))
        except (NotImplementedError, RuntimeError):
            continue  # a kind of tensor that has no memory which could be named
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def parts_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the tensors that a tensor consists of: as a rule, itself."""
    if type(tensor) not in _PLAIN:
        names = getattr(type(tensor), "__tensor_flatten__", None)
        if names is not None:
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
            # A DTensor names its mesh, too.
            return [part for one in inner if isinstance(one, torch.Tensor) for part in parts_of(one)]
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


@functools.cache
def _named(device: torch.device) -> str:
    return str(device)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all memory that the tensors keep alive, on all devices.

    A tied tensor counts once, a view as the whole storage that it keeps alive, a quantized or sparse tensor as its
    parts, not as its apparent shape. Memory that several storages share counts once: the sum is over the union of their
    address ranges. Storages without memory (on meta, fake) count as if each had its own.
    """
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    fake: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        memory = memory_of(tensor)
        for device, address, nbytes, _ in memory:
            spans[device].append((address, address + nbytes))
        if not memory:
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                fake[storage._cdata] = storage
    real = sum(_length(sorted(found)) for found in spans.values())
    return real + sum(int(storage.nbytes()) for storage in fake.values())


def _length(spans: list[tuple[int, int]]) -> int:
    total = reached = 0
    for begin, end in spans:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def module_bytes(module: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of the parameters, and of the buffers that are in no parameter's storage."""
    parameters = list(module.parameters())
    held = storage_bytes(parameters)
    return held, storage_bytes([*parameters, *module.buffers()]) - held
