"""Bytes of an optimizer's state, also before it has taken a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors of the state on their parameters' devices, once each parameter that needs a gradient has
    been stepped. What a parameter without a state will have is seen on a copy: of each shape a parameter of zeros is
    stepped by a copy of the optimizer.

    Raises ValueError where that step fails: an optimizer that wants a closure, or more than its parameters."""
    total = 0
    missing: dict[tuple[int, tuple[int, ...], torch.dtype, torch.device], int] = defaultdict(int)
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if state := optimizer.state.get(p):
                total += on_device(tensors(state), p.device)
            elif p.requires_grad:
                missing[index, tuple(p.shape), p.dtype, p.device] += 1
    if missing:
        counts = list(missing.values())
        try:
            made = stepped(optimizer, list(missing))
        except Exception as error:
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} has no state yet, and what it will have is not known, as a "
                f"step of a copy of it failed ({type(error).__name__}: {error}): give the state's bytes, or the "
                "optimizer after its first step"
            ) from error
        total += sum(count * size for count, size in zip(counts, made, strict=True))
    return total


def on_device(found: Iterable[torch.Tensor], device: torch.device) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in found if t.device == device}
    return sum(storage.nbytes() for storage in storages.values())


def stepped(
    optimizer: torch.optim.Optimizer,
    wanted: list[tuple[int, tuple[int, ...], torch.dtype, torch.device]],
) -> list[int]:
    """Bytes of state that a step of a copy of the optimizer gives each parameter: (group, shape, dtype, device)."""
    nothing = {id(p): p.new_empty(0) for group in optimizer.param_groups for p in group["params"]}
    stateless = copy.copy(optimizer)
    stateless.state = defaultdict(dict)
    trial = copy.deepcopy(stateless, dict(nothing))
    groups: list[list[torch.Tensor]] = [[] for _ in trial.param_groups]
    made = []
    for index, shape, dtype, device in wanted:
        p = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        p.grad = torch.zeros_like(p)
        groups[index].append(p)
        made.append(p)
    for group, parameters in zip(trial.param_groups, groups, strict=True):
        group["params"] = parameters
    type(trial).step(trial)
    return [on_device(tensors(trial.state[p]), p.device) for p in made]
