"""The parameters and buffers of modules, found anew for each step: nn.Module's own iterators take several times as
long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn


class Contents(NamedTuple):
    """Each once, in the order of a walk. buffers: the module that has one, its name there, and it."""

    parameters: list[Tensor]
    buffers: list[tuple[nn.Module, str, Tensor]]


def of(modules: Sequence[nn.Module]) -> Contents:
    left, seen = list(reversed(modules)), set[int]()
    found = Contents([], [])
    known = set[int]()
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known:
                known.add(id(parameter))
                found.parameters.append(parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found.buffers.append((module, key, buffer))
        if module._modules:
            left.extend(reversed(module._modules.values()))  # type: ignore[arg-type]
    return found
