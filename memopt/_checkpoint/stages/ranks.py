"""Chains whose parameters are sharded over ranks, by fully_shard or parallelize_module.

Their stages are full of collectives, so every rank has to run the same stages in the same order. The ranks agree on the
stages' costs, the largest measurement of any of them, and so all find the same schedule. A stage that runs again before
its turn in the backward pass finds the parameters of its FSDP2 unit sharded: they are gathered for it, and sharded
again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memopt._checkpoint.stages.measure import ChainMeasurement
    from memopt._offload.schedule_sets import Bandwidth

Gather = Callable[[], AbstractContextManager[None]]


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether fully_shard is to gather the module's parameters or those of a module in it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # large, and loaded where there is such a model
    return fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for one in module.modules())


def is_distributed(module: torch.nn.Module) -> bool:
    """Return whether this rank holds only a part of some parameter."""
    return is_sharded(module) or any(hasattr(p, "device_mesh") for p in module.parameters())


def agree(measured: ChainMeasurement, budget: int, speed: Bandwidth | None) -> tuple[int, Bandwidth | None]:
    """Make the ranks' costs one, in `measured`, and return the budget and the offload speed for all of them.

    Raises ValueError, on every rank, if the chains differ.
    """
    meshes = _meshes(measured)
    names = ("standing_bytes", "input_bytes", "held_bytes", "result_bytes")
    mine = [float(getattr(measured, name)) for name in names]
    mine += [float(measured.returns_last), -float(budget)]
    mine += [0.0, 0.0] if speed is None else [-speed.out, -speed.back]
    for row in (*measured.stage_bytes, *measured.stage_seconds):
        mine += map(float, row)
    mine += [float(external.nbytes) for external in measured.external_grads]
    length = len(mine)
    if _most([length, -length], meshes) != [length, -length]:
        raise ValueError(
            f"auto_checkpoint: the model has {len(measured.chain.names)} stages on this rank and another number on "
            "another rank: give every rank the same model, and samples of the same structure"
        )
    agreed = iter(_most(mine, meshes))
    for name in names:
        setattr(measured, name, int(next(agreed)))
    measured.returns_last = bool(next(agreed))
    budget = int(-next(agreed))
    out, back = -next(agreed), -next(agreed)
    measured.stage_bytes = [
        size._replace(**{name: type(was)(next(agreed)) for name, was in size._asdict().items()})
        for size in measured.stage_bytes
    ]
    measured.stage_seconds = [
        seconds._replace(**{name: next(agreed) for name in seconds._fields})
        for seconds in measured.stage_seconds
    ]
    measured.external_grads = [
        external._replace(nbytes=int(next(agreed))) for external in measured.external_grads
    ]
    return budget, None if speed is None else speed._replace(out=out, back=back)


def most(measured: ChainMeasurement, numbers: Sequence[int]) -> list[int]:
    """Return the greatest value of each number on any rank."""
    return list(map(int, _most(list(map(float, numbers)), _meshes(measured))))


def _meshes(measured: ChainMeasurement) -> dict[Any, None]:
    standing: list[Any] = list(measured.chain.standing)
    return {p.device_mesh: None for p in standing if hasattr(p, "device_mesh")}


def _most(numbers: Sequence[float], meshes: Sequence[Any] | dict[Any, None]) -> list[float]:
    """Return the greatest value of each number on any rank of the meshes.

    The ranks of a fake group, as an estimate has them, are taken to be like this one.
    """
    import torch.distributed as dist

    for mesh in meshes:
        groups = [group for group in mesh.get_all_groups() if dist.get_backend(group) != "fake"]
        if not groups:
            continue
        told = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
        for group in groups:
            dist.all_reduce(told, dist.ReduceOp.MAX, group)
        numbers = told.tolist()
    return list(numbers)


def gathers(model: torch.nn.Module, stages: Sequence[torch.nn.Module]) -> list[Gather] | None:
    """Return a context for each module's second run that gathers its parameters; None where nothing is sharded.

    Call it right after fully_shard, or between steps, when every parameter is sharded.
    """
    if not is_sharded(model):
        return None
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    units = {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
    names = {module: name for name, module in model.named_modules()}
    found: list[Gather] = []
    for stage in stages:
        name = names[stage]
        while name and name not in units:
            name = name.rpartition(".")[0]
        unit = units.get(name)
        found.append(nullcontext if unit is None else partial(_gathered, unit, _own_parameters(unit)))
    return found


def _own_parameters(unit: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that the unit gathers: not those of a unit in it."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    inner = [
        f"{name}." for name, module in unit.named_modules() if name and isinstance(module, fsdp.FSDPModule)
    ]
    return {
        name: p for name, p in unit.named_parameters() if not any(name.startswith(prefix) for prefix in inner)
    }


@contextmanager
def _gathered(unit: Any, shards: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    name = next(iter(shards), None)
    if name is None or unit.get_parameter(name) is not shards[name]:
        yield  # nothing of its own, or it is gathered already
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()
