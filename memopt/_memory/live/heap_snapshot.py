"""Heap snapshots: all memory of live tensors, each storage once, with its owner.

A snapshot walks over the objects that Python's collector knows, the tensors of modules and optimizers, and those that
autograd's graphs have saved. A storage belongs to the first of these owners: a module's parameter or buffer, a
gradient, an optimizer's state, a graph. Else it is the program's own: "inputs" if a tensor takes no part in a graph.
Memory that no Python tensor leads to (a library's workspace, a gradient in the middle of the backward pass) is not
included; the device's allocator counts it.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memopt._memory.live.variables import Variables
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
)
from memopt._runtime.storages import Memory, memory_of


@dataclass(slots=True)
class HeldStorage:
    """The memory of a storage, and its holders as far as they were found.

    Of a parameter, a gradient or a state: `owner` ("AdamW's exp_avg"), `model`, an index into HeapSnapshot.models, and
    its `name` there ("0.weight"). Of memory that only a graph keeps: `name` is the node's ("MulBackward0"), and `root`
    the index in HeapSnapshot.roots of the tensor whose graph it is.
    """

    device: str
    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: int
    owner: str = ""
    model: int | None = None
    name: str = ""
    root: int | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)  # those that Python knows


@dataclass
class HeapSnapshot:
    """A heap snapshot. It holds tensors: drop it (or call forget()) once it has been read."""

    held: dict[tuple[str, int], HeldStorage]
    roots: list[torch.Tensor]  # of graphs
    nodes: dict[int, int]  # of each root's graph
    models: list[torch.nn.Module]  # modules that no other module has
    optimizers: list[torch.optim.Optimizer]
    names: Variables  # of the tensors, roots and models
    complete: bool

    def forget(self) -> None:
        for one in self.held.values():
            one.tensors.clear()
        self.roots.clear()
        self.models.clear()
        self.optimizers.clear()

    def by_category(self, device: str) -> dict[str, int]:
        sums = dict.fromkeys(CATEGORIES, 0)
        for one in self.held.values():
            if one.device == device:
                sums[CATEGORIES[one.category]] += one.nbytes
        return sums

    def of(self, tensor: torch.Tensor) -> HeldStorage | None:
        return next((self.held.get(one[:2]) for one in memory_of(tensor)), None)


def take(seconds: float = 3.0, graph_seconds: float = 3.0) -> HeapSnapshot:
    """Take a snapshot of every live tensor of this process.

    It runs none of the program's code, and allocates nothing on a device. `seconds`: most CPU time of this thread for
    the search for variables; `graph_seconds`: for following graphs.
    """
    with no_collection():
        return _taken(seconds, graph_seconds)


def _taken(seconds: float, graph_seconds: float) -> HeapSnapshot:
    tensors, modules, optimizers = _known()
    models = _models(modules)
    names = Variables({id(one) for one in (*tensors, *models)}, seconds)
    with torch._C.DisableTorchFunctionSubclass():
        roots = [tensor for tensor in tensors if _has_graph(tensor)]
        # A node, and what it has saved, belongs to the tensor with the best name that leads there.
        walk = Walk(sorted(roots, key=names.rank), graph_seconds)
        held = _held(tensors, models, optimizers, walk)
    return HeapSnapshot(
        held, walk.roots, walk.nodes, models, optimizers, names, names.complete and walk.complete
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection: many small objects are made within the context, and none of them is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _known() -> tuple[list[torch.Tensor], list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """type(), not isinstance(): asking the class of a proxy may run its code."""
    objects = gc.get_objects()
    kinds = set(map(type, objects))
    families = [
        {kind for kind in kinds if issubclass(kind, family)}
        for family in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    ]
    wanted = set().union(*families)
    found: list[Any] = [one for one in objects if type(one) in wanted]
    tensors, modules, optimizers = ([one for one in found if type(one) in kinds] for kinds in families)
    return tensors, modules, optimizers


def _held(
    tensors: list[torch.Tensor],
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    walk: Walk,
) -> dict[tuple[str, int], HeldStorage]:
    held: dict[tuple[str, int], HeldStorage] = {}

    def attribute(tensor: torch.Tensor, category: int, **named: Any) -> None:
        for one in memory_of(tensor):
            if one[:2] not in held:
                held[one[:2]] = _made(one, category, **named)

    names: dict[int, dict[str, Any]] = {}
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names[id(tensor)] = {"model": number, "name": f"{path}.{name}" if path else name}
                    attribute(tensor, PARAMETERS, **names[id(tensor)])
    leaves = [tensor for tensor in tensors if _grad(tensor) is not None]
    leaves += [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
    for tensor in leaves:
        grad = _grad(tensor)
        if grad is not None:
            attribute(grad, GRADIENTS, owner="gradient", **names.get(id(tensor), {}))
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), {})
            for name, value in state.items() if isinstance(state, dict) else ():
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        attribute(tensor, OPTIMIZER, owner=f"{type(optimizer).__name__}'s {name}", **of)
    attributed = set(held)
    for tensor in tensors:
        for one in memory_of(tensor):
            if one[:2] not in held:
                held[one[:2]] = _made(one, ACTIVATIONS if _has_graph(tensor) else INPUTS)
            held[one[:2]].tensors.append(tensor)
    for tensor, node, root in walk.saved:
        for one in memory_of(tensor):
            key = one[:2]
            if key not in held:
                held[key] = _made(one, ACTIVATIONS, name=node, root=root)
            elif key not in attributed:
                held[key].category = ACTIVATIONS
                if not held[key].name:
                    held[key].name, held[key].root = node, root
    return held


def _made(memory: Memory, category: int, **named: Any) -> HeldStorage:
    device, address, nbytes, part = memory
    shape = tuple(part.shape) if part.numel() * part.element_size() == nbytes else ()
    return HeldStorage(device, address, nbytes, shape, _short(part.dtype), category, **named)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _models(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    below = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in below]


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.requires_grad and tensor.is_leaf else None


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf


@functools.cache
def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- autograd's graphs -----------------------------------------------------------------------------------------------
# Tensors that the nodes of autograd's graphs have saved for the backward pass.
#
# Nothing is unpacked. For a saved tensor whose hooks would recompute it (checkpointing) or fetch it (offloading), the
# object that the pack hook returned is read, because that is what is alive. No lock is taken either: a node may be
# inspected while it runs, in another thread or in this one.


class GraphTensor(NamedTuple):
    """A tensor that a node keeps; `root` is the number of the tensor whose backward reaches the node."""

    tensor: torch.Tensor
    node: str
    root: int


class Walk:
    """A walk over all nodes that these tensors lead to.

    `saved` is filled first, each node once, by the first root that reaches it; `nodes[i]` counts the nodes that root i
    alone, or first, leads to. The walk stops after some seconds of this thread's CPU time: then `complete` is False.
    """

    def __init__(self, roots: Iterable[torch.Tensor], seconds: float = float("inf")) -> None:
        self.roots = list(roots)
        self.saved: list[GraphTensor] = []
        self.nodes: dict[int, int] = {}
        self.complete = True
        seen: set[Any] = set()
        end = time.thread_time() + seconds
        for number, root in enumerate(self.roots):
            stack, count = [root.grad_fn], 0
            while stack:
                node = stack.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                count += 1
                if count % 256 == 0 and time.thread_time() > end:
                    self.complete = False
                    break
                self.saved += [GraphTensor(tensor, node.name(), number) for tensor in saved_by(node)]
                stack.extend([following for following, _ in node.next_functions])
            self.nodes[number] = count
            if not self.complete:
                return


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that one node keeps; none once it has let them go."""
    kind: Any = type(node)
    for attribute in _attributes(kind):
        try:
            value = getattr(node, attribute)
        except RuntimeError:  # a backward pass has freed them
            continue
        yield from _kept(value)
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # ctx.x = …
        yield from (value for value in vars(node).values() if isinstance(value, torch.Tensor))


def nodes_of(tensor: torch.Tensor, most: int = 1_000_000) -> int:
    """Count the nodes of the graph behind a tensor, up to `most`."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack and len(seen) < most:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend([following for following, _ in node.next_functions])
    return len(seen)


@functools.cache
def _attributes(kind: type) -> tuple[str, ...]:
    """The names under which a kind of node has its saved tensors as they are kept."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _kept(value: Any) -> Iterator[torch.Tensor]:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        data = getattr(one, "data", None)  # of a SavedTensor: None once it is released
        if isinstance(data, torch.Tensor):
            yield data
        elif isinstance(data, (tuple, list)):  # what a pack hook gave, such as (device, the copy)
            yield from (part for part in data if isinstance(part, torch.Tensor))
