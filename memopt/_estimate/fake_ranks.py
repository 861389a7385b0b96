"""One rank of a job of several, without the others.

Collectives go to torch's fake process group, which moves nothing, so that shards, buckets and gathered parameters have
the sizes that they have among `count` ranks. The rank is alone on its node: LOCAL_RANK is 0, and its card the only one.
The result of a collective keeps its previous values; where memory depends on them (an uneven all-to-all, say), it is
that of a rank whose peers are like it. A script that knows of one device is parallelized by torch's own functions.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def install_fake_groups(rank: int, count: int) -> None:
    """Make init_process_group() and new_group() create fake groups from now on, whatever backend they name."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, group = distributed_c10d.init_process_group, distributed_c10d.new_group

    def init_process_group(*_: Any, **named: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=count, group_name=named.get("group_name", ""))

    def new_group(ranks: Any = None, *_: Any, **named: Any) -> Any:
        kept = {name: named[name] for name in ("group_desc", "use_local_synchronization") if name in named}
        return group(ranks, backend="fake", **kept)

    _reduce_in_place(DistributedDataParallel)
    for module in (dist, distributed_c10d, device_mesh):
        for name, made in (("init_process_group", init_process_group), ("new_group", new_group)):
            if hasattr(module, name):
                setattr(module, name, made)


def install_in_started(applies: Callable[[], bool]) -> None:
    """The same, once a process that `applies` is to calls init_process_group(), as the rank that it says there."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named).arguments
        count = given.get("world_size", -1)
        rank = given.get("rank", -1)
        count = int(os.environ.get("WORLD_SIZE", "1")) if count < 0 else count
        rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
        if count < 2 or not applies():
            original(*args, **named)
            return
        dist.init_process_group = distributed_c10d.init_process_group = original
        install_fake_groups(rank, count)
        dist.init_process_group(group_name=given.get("group_name", ""))

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def _reduce_in_place(parallel: Any) -> None:
    """Leave DDP's buckets as they are: DDP asks for a reduction's result, which a fake reduction does not have.

    A communication hook of the script's own, which compresses gradients, is not called, so its temporaries do not
    count.
    """
    import torch

    make, register = parallel.__init__, parallel.register_comm_hook

    def reduced(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__.clear()  # torch checks them, and these are texts

    def init(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        register(self, None, reduced)

    parallel.__init__ = init
    parallel.register_comm_hook = lambda self, state, hook: None


# ---- parallelism -----------------------------------------------------------------------------------------------------


KINDS = ("ddp", "fsdp", "tp")


def parallelize(kind: str, count: int) -> None:
    """Parallelize a script that knows of one device, once a process, before it runs. kind: one of KINDS.

    When the script makes its optimizer, the model that holds those parameters is found and wrapped by torch's own
    function, and the optimizer is given the resulting parameters.
    """
    wrap = {"ddp": _replicate, "fsdp": _shard, "tp": _split}[kind]
    made = torch.optim.Optimizer.__init__
    known: dict[int, nn.Module] = {}  # models that are parallelized already, by the first optimizer

    def init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        groups = _groups(params)
        places: dict[int, tuple[nn.Module, str]] = {}
        for root in _roots([_parameter(entry) for group in groups for entry in group["params"]]):
            if id(root) not in known:
                known[id(root)] = root
                before = dict(root.named_parameters())
                wrap(root, count)
                places |= {id(p): (root, name) for name, p in before.items()}

        def now(entry: Any) -> Any:
            root, name = places.get(id(_parameter(entry)), (None, ""))
            p = _parameter(entry) if root is None else root.get_parameter(name)
            return (entry[0], p) if isinstance(entry, tuple) else p

        for group in groups:
            group["params"] = [now(entry) for entry in group["params"]]
        made(self, [part for group in groups for part in _by_kind(group)], defaults)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
    if kind == "tp":  # torch's refuses DTensors beside plain tensors
        from memopt.amp import clip_grad_norm_

        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def _groups(params: Any) -> list[dict[str, Any]]:
    """Return parameter groups from what torch's constructor takes: a tensor, tensors, (name, tensor) pairs, groups."""
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not (given and isinstance(given[0], dict)):
        return [{"params": given}]
    groups = [dict(group) for group in given]
    for group in groups:
        held = group["params"]
        group["params"] = [held] if isinstance(held, torch.Tensor) else list(held)
    return groups


def _parameter(entry: Any) -> torch.Tensor:
    found: torch.Tensor = entry[1] if isinstance(entry, tuple) else entry
    return found


def _by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    """An optimizer's operations take DTensors or plain tensors, not both at once."""
    parts: dict[bool, list[Any]] = {}
    for entry in group["params"]:
        parts.setdefault(hasattr(_parameter(entry), "device_mesh"), []).append(entry)
    return [group | {"params": part} for part in parts.values()] or [group]


def _roots(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules that hold any of these. Raise ValueError if none does."""
    wanted = {id(p) for p in parameters}
    holding = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)  # no `__class__` of others is asked
        and "_parameters" in module.__dict__
        and any(id(p) in wanted for p in module.parameters())
    ]
    inner = {id(child) for module in holding for child in module.modules() if child is not module}
    roots = [module for module in holding if id(module) not in inner]
    if not roots:
        raise ValueError("the optimizer's parameters belong to no module that can be parallelized over ranks")
    return roots


# ---- the three ways --------------------------------------------------------------------------------------------------


def _replicate(root: nn.Module, count: int) -> None:
    """Make root() run as DDP's module does."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _meet(dist)
    forward: Callable[..., Any] = root.forward
    parallel = DistributedDataParallel(root)
    inside = False

    def through(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return forward(*args, **kwargs)
        inside = True
        try:
            return parallel(*args, **kwargs)
        finally:
            inside = False

    root.forward = through


def _shard(root: nn.Module, count: int) -> None:
    """Shard each block by itself, as FSDP2 is meant to be used: the modules of a list or a sequence; then the rest."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    _meet(dist)
    mesh = dist.device_mesh.init_device_mesh("cuda", (count,))
    inner: list[nn.Module] = []
    for module in root.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module is not root:
            inner += [block for block in module if any(True for _ in block.parameters())]
    if isinstance(root, nn.Sequential):
        inner += [block for block in root if any(True for _ in block.parameters())]
    outermost = [b for b in inner if not any(b is not o and any(b is m for m in o.modules()) for o in inner)]
    for block in dict.fromkeys(outermost):
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)


def _split(root: nn.Module, count: int) -> None:
    """Shard every linear layer and embedding by its outputs, which are gathered.

    This is right for any model, though a plan made for the model (rows after columns) has less to gather.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    _meet(dist)
    mesh = dist.device_mesh.init_device_mesh("cuda", (count,))
    shared = _used_twice(root)
    plan: dict[str, Any] = {}
    for name, module in root.named_modules():
        if not name or any(p in shared for p in map(id, module.parameters(recurse=False))):
            continue
        width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None)
        if isinstance(module, (nn.Linear, nn.Embedding)) and width and width % count == 0:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(root, mesh, plan)


def _used_twice(root: nn.Module) -> set[int]:
    """Return tied parameters, which stay whole."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in root.modules():
        for p in module.parameters(recurse=False):
            (twice if id(p) in seen else seen).add(id(p))
    return twice


def _meet(dist: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group()
