"""What of a model visits the device together: the blocks of its lists of modules, each with all that is in it, and
what is around them, module by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Slot(NamedTuple):
    """Where a module holds a parameter: owner._parameters[name]."""

    owner: nn.Module
    name: str


class Layer:
    """Parameters that are on the device while `module` is called.

    whole: all that is in the module, down to where other layers begin; else the module's own parameters alone, which
    its forward uses around calls of other layers."""

    __slots__ = ("__weakref__", "module", "name", "slots", "whole")

    def __init__(self, name: str, module: nn.Module, slots: tuple[Slot, ...], whole: bool) -> None:
        self.name, self.module, self.slots, self.whole = name, module, slots, whole

    def __repr__(self) -> str:
        return f"Layer({self.name or type(self.module).__name__!r}, {len(self.slots)} parameters)"

    def parameters(self) -> list[nn.Parameter]:
        """Each once, as they are now."""
        found = (slot.owner._parameters.get(slot.name) for slot in self.slots)
        return list({id(p): p for p in found if p is not None}.values())


def nbytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.nbytes for p in parameters)


def find_layers(model: nn.Module, chosen: Iterable[str | nn.Module] | None = None) -> list[Layer]:
    """The model's layers in the order in which they are registered; every parameter is in one.

    chosen: names of modules in the model, or the modules: each is a layer; what is around them is split as by default.
    By default the children of lists (ModuleList, Sequential, ModuleDict) are layers, of lists within lists the outer
    ones', down to the bytes of the longest list's largest child.

    Raises ValueError where a name is not one of a module in the model, or a chosen module is within another."""
    names = {module: name for name, module in model.named_modules()}
    wanted = None if chosen is None else _chosen(model, names, chosen)
    block = 0 if wanted is not None else _block_bytes(model)
    layers: list[Layer] = []
    seen: set[nn.Module] = set()

    def split(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if wanted is None:
            whole = module is not model and (
                nbytes(module.parameters()) <= block or not any(map(_is_split_list, module.modules()))
            )
        else:
            whole = module in wanted or not any(inner in wanted for inner in module.modules())
            if whole and module is model and module not in wanted:
                whole = False
        if whole:
            inside = list(module.modules())
            seen.update(inside)
            slots = tuple(slot for inner in inside for slot in own_slots(inner))
            if slots:
                layers.append(Layer(names[module], module, slots, True))
            return
        if own := tuple(own_slots(module)):
            layers.append(Layer(names[module], module, own, False))
        for child in module.children():
            split(child)

    split(model)
    return layers


def own_slots(module: nn.Module) -> Iterator[Slot]:
    return (Slot(module, name) for name, p in module._parameters.items() if p is not None)


def _is_split_list(module: nn.Module) -> bool:
    return isinstance(module, LISTS) and _length(module) > 1


def _length(module: nn.Module) -> int:
    """Children that have parameters."""
    return sum(next(child.parameters(), None) is not None for child in module.children())


def _block_bytes(model: nn.Module) -> int:
    lists = [module for module in model.modules() if _is_split_list(module)]
    if not lists:
        return 0
    longest = max(lists, key=lambda module: (_length(module), nbytes(module.parameters())))
    return max(nbytes(child.parameters()) for child in longest.children())


def _chosen(
    model: nn.Module, names: dict[nn.Module, str], chosen: Iterable[str | nn.Module]
) -> set[nn.Module]:
    if isinstance(chosen, (str, nn.Module)):
        chosen = list(chosen) if isinstance(chosen, LISTS[:2]) else [chosen]
    by_name = dict(model.named_modules(remove_duplicate=False))
    found: set[nn.Module] = set()
    for which in chosen:
        module = by_name.get(which) if isinstance(which, str) else which
        if not isinstance(module, nn.Module) or module not in names:
            raise ValueError(
                f"layers: {which!r} is not a module of the model, nor the name of one; model.named_modules() lists them"
            )
        found.add(module)
    for module in found:
        for inner in list(module.modules())[1:]:
            if inner in found:
                raise ValueError(
                    f"layers: {names[inner]!r} is within {names[module]!r}: name one of the two, not both"
                )
    return found
