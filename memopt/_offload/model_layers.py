"""Layers of a model, whose parameters are on the device together: the blocks of its lists of modules, each with all
that is in it, and what is around them, module by module; and models that cannot be offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from memopt._runtime import arguments

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class ParameterSlot(NamedTuple):
    """A module's entry for a parameter: owner._parameters[name]."""

    owner: nn.Module
    name: str


class Layer:
    """Parameters that are on the device while `module` is called.

    whole: all that is in the module, down to where other layers begin; else the module's own parameters alone, which
    its forward uses around calls of other layers."""

    __slots__ = ("__weakref__", "module", "name", "slots", "whole")

    def __init__(self, name: str, module: nn.Module, slots: tuple[ParameterSlot, ...], whole: bool) -> None:
        self.name, self.module, self.slots, self.whole = name, module, slots, whole

    def __repr__(self) -> str:
        return f"Layer({self.name or type(self.module).__name__!r}, {len(self.slots)} parameters)"

    def parameters(self) -> list[nn.Parameter]:
        """Return the current parameters, each once."""
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


def own_slots(module: nn.Module) -> Iterator[ParameterSlot]:
    return (ParameterSlot(module, name) for name, p in module._parameters.items() if p is not None)


def _is_split_list(module: nn.Module) -> bool:
    return isinstance(module, LISTS) and _length(module) > 1


def _length(module: nn.Module) -> int:
    """Return the number of children with parameters."""
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


# ---- models that cannot be offloaded ---------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Raise TypeError or ValueError, with the reason and the remedy, if the model cannot be offloaded."""
    arguments.check_module(model, "offload_layers: model")
    for name, module in model.named_modules():
        if why := _refusal(module):
            raise ValueError(f"offload_layers: {_where(name, module)} {why}")
    for name, parameter in model.named_parameters():
        if why := _parameter_refusal(parameter):
            raise ValueError(f"offload_layers: parameter {name!r} {why}")
    _check_memory(model)


def _where(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _refusal(module: nn.Module) -> str | None:
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if kinds.intersection(WRAPPERS) or "FSDPModule" in kinds:
        return (
            "manages its parameters itself: FSDP2 offloads with its own CPUOffloadPolicy; offload the module inside "
            "DDP before it is wrapped on one device only"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, whose code holds its parameters: offload the module it was made from"
    if module._compiled_call_impl is not None or "OptimizedModule" in kinds:
        return "is compiled, and compiled code holds its parameters: offload the plain module, without torch.compile"
    if parametrize.is_parametrized(module):
        return (
            "has parametrizations, which compute its parameters from others at every use: "
            "torch.nn.utils.parametrize.remove_parametrizations() first"
        )
    return None


def _parameter_refusal(p: nn.Parameter) -> str | None:
    if isinstance(p, UninitializedParameter):
        return "has no shape yet: run the lazy module once first"
    if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
        kind = type(p if type(p) is not nn.Parameter else p.data).__name__
        return f"is a {kind}: only plain tensors can be moved byte by byte"
    if p.layout is not torch.strided:
        return f"is sparse ({p.layout}): only dense parameters can be copied to a device"
    if p.is_quantized:
        return "is quantized: only plain tensors can be moved byte by byte"
    if p.device.type not in ("cpu", "cuda"):
        return f"is on {p.device.type}: only CUDA devices and the CPU are supported" + (
            "; give it values first (to_empty(), load_state_dict())" if p.is_meta else ""
        )
    return None


def _check_memory(model: nn.Module) -> None:
    """Refuse two parameters in the same memory, which offloading would separate."""
    begin_end = sorted(_spans(model))
    for (_, end, first), (begin, _, second) in pairwise(begin_end):
        if begin < end:
            raise ValueError(
                f"offload_layers: parameters {first!r} and {second!r} share memory but are not the same nn.Parameter: "
                "tie them by assigning one of them to the other module"
            )


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    for name, p in model.named_parameters():
        if p.numel():
            extent = 1 + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            yield p.data_ptr(), p.data_ptr() + extent * p.element_size(), name


def devices_of(model: nn.Module) -> list[torch.device]:
    return list(dict.fromkeys(p.device for p in model.parameters()))
