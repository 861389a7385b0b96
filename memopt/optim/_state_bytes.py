"""The bytes of an optimizer's state, also before it has taken a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.stages.costs import allocator_bytes
from memopt._runtime.log import logger
from memopt.optim._state_layout import is_plain


class Kind(NamedTuple):
    """A kind of parameter: all that decides on the bytes of its state."""

    group: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # contiguous where its own are not dense
    dtype: torch.dtype
    device: torch.device


class OptimizerBytes(NamedTuple):
    """The state that an optimizer has or will have on its parameters' devices.

    there: tensors of its state. coming: bytes of each tensor that its next step adds to them, in that order. passing:
    bytes of each that a step takes besides, all at the same time; none where no step of a copy could be taken. unseen:
    bytes of state that are only said to be.
    """

    there: list[torch.Tensor]
    coming: list[int]
    passing: list[int]
    unseen: int

    @property
    def there_bytes(self) -> int:
        return self.unseen + sum(int(t.untyped_storage().nbytes()) for t in self.there)


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the state on its parameters' devices, once each parameter that needs a gradient has been stepped.

    The state of a parameter that has none yet is seen on a copy: of each shape a parameter of zeros is stepped by a
    copy of the optimizer.

    Raises:
        ValueError: That step fails: an optimizer that wants a closure, or more than its parameters.
    """
    found = foretold(optimizer)
    return found.there_bytes + sum(found.coming)


def kind_of(group: int, p: torch.Tensor) -> Kind:
    """Return the kind of a parameter of the param group of that number."""
    strides = p.stride() if is_plain(p) else torch.empty(p.shape, device="meta").stride()
    return Kind(group, tuple(p.shape), tuple(strides), p.dtype, p.device)


def foretold(optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> OptimizerBytes:
    """Return what state_bytes() adds up, in parts. device: of parameters elsewhere nothing counts; None: all count."""
    there: list[torch.Tensor] = []
    missing: list[Kind] = []
    trained: list[Kind] = []
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if device is not None and p.device != device:
                continue
            kind = kind_of(index, p)
            if state := optimizer.state.get(p):
                there += on_device(tensors(state), p.device)
            elif p.requires_grad:
                missing.append(kind)
            if p.requires_grad:
                trained.append(kind)
    coming: list[int] = []
    if missing:
        try:
            made = stepped(optimizer, list(dict.fromkeys(missing)))
        except Exception as error:
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} has no state yet, and the size of its state is not known, "
                f"because a step of a copy failed ({type(error).__name__}: {error}): give the state's bytes, or the "
                "optimizer after its first step"
            ) from error
        coming = [size for kind in missing for size in made[kind]]
    try:
        passing = passing_bytes(optimizer, trained)
    except Exception as error:  # it wants a closure, say; its state is there
        logger.info(
            "the memory that a step of %s takes besides its state is not known: %s",
            type(optimizer).__name__,
            error,
        )
        passing = []
    return OptimizerBytes(there, coming, passing, 0)


def on_device(found: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return one tensor of each storage on the device."""
    return list({t.untyped_storage()._cdata: t for t in found if t.device == device}.values())


def passing_bytes(optimizer: torch.optim.Optimizer, trained: Sequence[Kind]) -> list[int]:
    """The bytes that a step of all these takes besides its state, at the most.

    torch's foreach implementations take as much for each parameter, at the same time; the others for one after the
    other, with what is left of the one before.
    """
    taken = {kind: taken_by_steps(optimizer, kind, 1) for kind in dict.fromkeys(trained)}
    most: list[int] = []
    for index in range(len(optimizer.param_groups)):
        mine = [kind for kind in trained if kind.group == index and taken[kind]]
        if mine:
            smallest = min(mine, key=taken.__getitem__)
            two, three = (taken_by_steps(optimizer, smallest, count) for count in (2, 3))
            if three > two:
                together = [taken[kind] for kind in mine]
            else:
                together = [max(taken_by_steps(optimizer, kind, 2) for kind in dict.fromkeys(mine))]
            most = max(most, together, key=sum)
    return most


def taken_by_steps(optimizer: torch.optim.Optimizer, kind: Kind, count: int) -> int:
    """Return the bytes that a step of so many parameters takes besides its state."""
    trial, _ = trial_of(optimizer, [kind] * count)
    step_unhooked(trial)
    allocator = allocator_bytes(kind.device)
    allocator.start()
    try:
        before, _ = allocator.restart()
        step_unhooked(trial)
        now, peak = allocator.now_and_peak()
    finally:
        allocator.stop()
    return max(0, peak - max(before, now))


def stepped(optimizer: torch.optim.Optimizer, wanted: list[Kind]) -> dict[Kind, list[int]]:
    """Return the bytes of each state tensor that a step of a copy of the optimizer creates for a parameter."""
    trial, made = trial_of(optimizer, wanted)
    step_unhooked(trial)
    return {
        kind: [t.untyped_storage().nbytes() for t in on_device(tensors(trial.state[p]), p.device)]
        for kind, p in zip(wanted, made, strict=True)
    }


def step_unhooked(trial: torch.optim.Optimizer) -> None:
    """Take a step without its hooks: what counts steps, as a script or an estimate does, is not to see this one."""
    step: Any = type(trial).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(trial)


def trial_of(
    optimizer: torch.optim.Optimizer, wanted: list[Kind]
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Return a copy of the optimizer for parameters of zeros, and these parameters."""
    nothing = {id(p): p.new_empty(0) for group in optimizer.param_groups for p in group["params"]}
    own, optimizer.state = optimizer.state, defaultdict(dict)  # which may be on a disk
    try:
        trial = copy.deepcopy(optimizer, dict(nothing))
    finally:
        optimizer.state = own
    groups: list[list[torch.Tensor]] = [[] for _ in trial.param_groups]
    made = []
    for index, shape, strides, dtype, device in wanted:
        p = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_().requires_grad_()
        p.grad = torch.zeros_like(p)
        groups[index].append(p)
        made.append(p)
    for group, parameters in zip(trial.param_groups, groups, strict=True):
        group["params"] = parameters
    return trial, made
