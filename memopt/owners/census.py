"""All memory of live tensors, each storage once, and whose it is: a walk over what Python's collector knows, what
modules and optimizers hold, and what autograd's graphs have saved.

A storage belongs to the first of these that claims it: a module's parameter or buffer, a gradient, an optimizer's
state, a graph; then it is the program's own: "inputs" where a tensor takes no part in a graph. What no tensor of
Python's leads to (a library's workspace, a gradient on its way through the backward pass) is not here; the device's
allocator counts it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memopt.owners.graphs import Walk
from memopt.owners.variables import Variables
from memopt.profiling.recording import ACTIVATIONS, CATEGORIES, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS


@dataclass(slots=True)
class Held:
    """The memory of a storage, and what was found of its holders. Of a parameter, a gradient or a state: `claim`
    ("AdamW's exp_avg"), `model`, the number in Census.models, and `name` there ("0.weight"). Of what only a graph
    keeps: `name` is the node's ("MulBackward0"), and `root` the number in Census.roots of the tensor whose graph it
    is."""

    device: str
    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: int
    claim: str = ""
    model: int | None = None
    name: str = ""
    root: int | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)  # those that Python knows


@dataclass
class Census:
    """Holds tensors: drop it (or call forget()) when it has been read."""

    held: dict[tuple[str, int], Held]
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

    def of(self, tensor: torch.Tensor) -> Held | None:
        return next((self.held.get(one[:2]) for one in memory_of(tensor)), None)


def take(seconds: float = 3.0, graph_seconds: float = 3.0) -> Census:
    """Every live tensor of this process. Runs no code of the program's, and allocates nothing on a device. `seconds`:
    for how long variables are searched for names at the most, `graph_seconds` for how long graphs are followed, both of
    this thread on a processor."""
    with no_collection():
        return _taken(seconds, graph_seconds)


def _taken(seconds: float, graph_seconds: float) -> Census:
    tensors, modules, optimizers = _known()
    models = _models(modules)
    names = Variables({id(one) for one in (*tensors, *models)}, seconds)
    with torch._C.DisableTorchFunctionSubclass():
        roots = [tensor for tensor in tensors if _has_graph(tensor)]
        # A node, and what it has saved, belongs to the tensor with the best name that leads there.
        walk = Walk(sorted(roots, key=names.rank), graph_seconds)
        held = _held(tensors, models, optimizers, walk)
    return Census(held, walk.roots, walk.nodes, models, optimizers, names, names.complete and walk.complete)


@contextmanager
def no_collection() -> Iterator[None]:
    """Of garbage: many small objects come into being here, and none of them is."""
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
) -> dict[tuple[str, int], Held]:
    held: dict[tuple[str, int], Held] = {}

    def claim(tensor: torch.Tensor, category: int, **named: Any) -> None:
        for one in memory_of(tensor):
            if one[:2] not in held:
                held[one[:2]] = _made(one, category, **named)

    names: dict[int, dict[str, Any]] = {}
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names[id(tensor)] = {"model": number, "name": f"{path}.{name}" if path else name}
                    claim(tensor, PARAMETERS, **names[id(tensor)])
    leaves = [tensor for tensor in tensors if _grad(tensor) is not None]
    leaves += [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
    for tensor in leaves:
        grad = _grad(tensor)
        if grad is not None:
            claim(grad, GRADIENTS, claim="gradient", **names.get(id(tensor), {}))
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), {})
            for name, value in state.items() if isinstance(state, dict) else ():
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        claim(tensor, OPTIMIZER, claim=f"{type(optimizer).__name__}'s {name}", **of)
    claimed = set(held)
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
            elif key not in claimed:
                held[key].category = ACTIVATIONS
                if not held[key].name:
                    held[key].name, held[key].root = node, root
    return held


def _made(memory: Memory, category: int, **named: Any) -> Held:
    device, address, nbytes, part = memory
    shape = tuple(part.shape) if part.numel() * part.element_size() == nbytes else ()
    return Held(device, address, nbytes, shape, _short(part.dtype), category, **named)


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
    """The storages that a tensor consists of: its own, as a rule; of a sparse one those of indices and values; of a
    wrapper those of what it wraps; of one that only pretends (a fake tensor) none."""
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
    """Of which it consists: itself, as a rule."""
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
