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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memopt._memory.live.autograd_graph import Walk
from memopt._memory.live.variables import Variables
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
)


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


@functools.cache
def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
