"""What tensors take: the bytes of their storages, each byte once, whatever shows how much of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from memopt.owners.census import memory_of, parts_of


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all memory that the tensors keep alive, on all devices. A tied tensor counts once, a view as the whole storage
    that it keeps alive, a quantised or sparse tensor as what it is made of, and not as what it looks like. Memory that
    several storages share is counted once: what is added up is the union of their address ranges. Storages without
    memory (on meta, fake) count as if each had its own."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    pretended: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        memory = memory_of(tensor)
        for device, address, nbytes, _ in memory:
            spans[device].append((address, address + nbytes))
        if not memory:
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                pretended[storage._cdata] = storage
    real = sum(_length(sorted(found)) for found in spans.values())
    return real + sum(int(storage.nbytes()) for storage in pretended.values())


def _length(spans: list[tuple[int, int]]) -> int:
    total = reached = 0
    for begin, end in spans:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def module_bytes(module: torch.nn.Module) -> tuple[int, int]:
    """(of the parameters, of the buffers that are in no parameter's storage)."""
    parameters = list(module.parameters())
    held = storage_bytes(parameters)
    return held, storage_bytes([*parameters, *module.buffers()]) - held
