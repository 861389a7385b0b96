"""memopt.compress.duplicates(): what of a model is one memory, and what could be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from memopt import _C
from memopt._runtime.storages import memory_of, storage_bytes


@dataclass(frozen=True)
class Duplicates:
    """Names of parameters and buffers that share a storage, or are equal.

    `tied`: groups that lie in one storage, as one parameter under several names or as views. `equal`: groups of the
    same shape, type and bytes, each in memory of its own: tie_() makes matrices among them one, others where they are
    named. `could_save`: bytes of memory that would be freed if each group of `equal` were one.
    """

    tied: tuple[tuple[str, ...], ...]
    equal: tuple[tuple[str, ...], ...]
    could_save: int

    def __str__(self) -> str:
        lines = [f"tied: {', '.join(group)}" for group in self.tied]
        lines += [f"equal, and could be tied: {', '.join(group)}" for group in self.equal]
        lines.append(f"tying what is equal would save {_C.format_size(self.could_save)}")
        return "\n".join(lines)

    __repr__ = __str__


def duplicates(model: nn.Module) -> Duplicates:
    """Find parameters and buffers that share a storage, and those that are equal byte for byte without sharing one.

    Values are compared only among tensors of the same shape, type and device, whole and exactly (NaN equals the same
    NaN, 0.0 is not -0.0); sparse and quantised ones, and those on the meta device, are looked at for sharing alone.

    Args:
        model: The model to look at; it is not changed.

    Returns:
        The names, as Duplicates.

    Example:
        >>> print(memopt.compress.duplicates(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"duplicates: expected a torch.nn.Module, got a {type(model).__name__}")
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    tied: dict[object, list[str]] = defaultdict(list)
    for name, tensor in named:
        for place in _places(tensor):
            tied[place].append(name)
    groups = {tuple(dict.fromkeys(names)): None for names in tied.values() if len(set(names)) > 1}
    equal = _equal(named)
    tensors = dict(named)
    everything = [tensor for _, tensor in named]
    merged = {name for group in equal for name in group[1:]}
    kept = [tensor for name, tensor in named if not any(tensor is tensors[gone] for gone in merged)]
    could_save = storage_bytes(everything) - storage_bytes(kept)
    return Duplicates(tuple(groups), tuple(equal), could_save)


def _places(tensor: torch.Tensor) -> set[object]:
    """Identity of a tensor's memory; on the meta device, which has none, its storage object."""
    if tensor.is_meta and tensor.layout is torch.strided:
        return {("meta", tensor.untyped_storage()._cdata)}
    return {(device, address) for device, address, *_ in memory_of(tensor)}


def _equal(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, ...]]:
    """In the order of their first names."""
    alike: dict[object, list[list[tuple[str, torch.Tensor]]]] = defaultdict(list)
    for name, tensor in named:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or not memory_of(tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            continue
        groups = alike[tensor.shape, tensor.dtype, tensor.device, _beginning(tensor)]
        if any(_places(tensor) & _places(other) for group in groups for _, other in group):
            continue  # one memory already: said as tied
        for group in groups:
            if same_bytes(group[0][1], tensor):
                group.append((name, tensor))
                break
        else:
            groups.append([(name, tensor)])
    found = [
        tuple(name for name, _ in group) for groups in alike.values() for group in groups if len(group) > 1
    ]
    order = {name: number for number, (name, _) in enumerate(named)}
    return sorted(found, key=lambda group: order[group[0]])


def _beginning(tensor: torch.Tensor) -> tuple[int, ...]:
    """The first few elements of a tensor that has some, so that tensors that differ are seldom compared whole."""
    row = tensor.detach()[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.detach().reshape(1)
    return tuple(_as_bytes(row[:16]).tolist())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two plain tensors of the same shape, type and device."""
    return bool(torch.equal(_as_bytes(one.detach()), _as_bytes(other.detach())))


def is_constant(tensor: torch.Tensor) -> bool:
    """True where all elements of a plain tensor, which has some, are the same byte for byte."""
    elements = _as_bytes(tensor.detach()).view(tensor.numel(), -1)
    return bool((elements == elements[0]).all())


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, among which NaN is equal to itself."""
    plain = tensor.contiguous().flatten()
    return plain.view(_OF_SIZE.get(plain.element_size(), torch.uint8))
