"""Bytes of tensors' storages, each byte counted once, however many views show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from memopt._memory.live.heap_snapshot import memory_of, parts_of


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
