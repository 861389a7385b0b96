"""What tensors take: the bytes of their storages, each counted once, whatever shows how much of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memopt.owners.census import parts_of


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all their storages. A tied tensor counts once, a view as the whole that it keeps alive, a quantised or sparse
    tensor as what it is made of, and not as what it looks like."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            found[storage._cdata] = storage
    return sum(storage.nbytes() for storage in found.values())


def module_bytes(module: torch.nn.Module) -> tuple[int, int]:
    """(of the parameters, of the buffers that are in no parameter's storage)."""
    parameters = list(module.parameters())
    held = storage_bytes(parameters)
    return held, storage_bytes([*parameters, *module.buffers()]) - held
