"""Candidate fixes for a failed request, from what can be seen while everything is alive: the holders of memory, the
optimizers, and what only another run can show. trials.py tests later whether they fit.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.data import BatchSampler

from memopt import _C
from memopt._memory.live.heap_snapshot import HeapSnapshot
from memopt._memory.live.live_tensors import LiveTensor, LiveTensors, any_element
from memopt._memory.oom.known_run import FirstStepRequests
from memopt._memory.oom.location import Location
from memopt.optim._state_layout import BLOCK


@dataclass(frozen=True)
class Fix:
    """A change with which what was recorded fits. `peak`: bytes of tensors then; `changes`: how the results differ, ""
    where they do not."""

    text: str
    peak: int
    changes: str = ""

    def __str__(self) -> str:
        changes = f", {self.changes}" if self.changes else ""
        return f"{self.text}: peak {_C.format_size(self.peak)}{changes}"


class Holder(NamedTuple):
    """The variable that leads to a block, and the line that binds it."""

    name: str
    where: str
    only_in_graph: bool


@dataclass(frozen=True)
class Stepping:
    """An optimizer of torch's. `plan`, `fused_plan`, `eight_bit_plan`: what its first step asks for as it is, with
    fused=True, and with states of 8 bits; None where that is not known or cannot be."""

    kind: str
    parameters: int
    loops_fused: bool
    plan: FirstStepRequests | None = None
    fused_plan: FirstStepRequests | None = None
    eight_bit_plan: FirstStepRequests | None = None


@dataclass(frozen=True)
class Situation:
    """The facts that decide which fixes are tried.

    capacity: most bytes that the allocator can hold here. phase: of the training step. holders: by address. moments: by
    address, the bytes that the state there takes in 8 bits. untried: fixes that no recording can test.
    """

    device: str
    asked: int
    capacity: int
    phase: str
    pool: bool  # memopt's allocator is in use
    first: bool  # an optimizer has not taken its first step
    evaluating: bool  # every model is in eval()
    holders: dict[int, Holder] = field(default_factory=dict)
    moments: dict[int, list[int]] = field(default_factory=dict)
    optimizers: list[Stepping] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)


def situation(
    device: str,
    asked: int,
    capacity: int,
    at: Location,
    pool: bool,
    live: LiveTensors,
    snapshot: HeapSnapshot,
) -> Situation:
    """Collect the facts that decide which fixes are tried. They are copied: nothing of the program is held."""
    here = [tensor for tensor in live.tensors if tensor.device == device]
    models = [model for model in snapshot.models if any(p.requires_grad for p in model.parameters())]
    evaluating = bool(models) and not any(model.training for model in models)
    return Situation(
        device,
        asked,
        capacity,
        at.phase,
        pool,
        bool(models) and _one_has_not_stepped(snapshot.optimizers),
        evaluating,
        {
            one.address: Holder(any_element(one.name), one.where, one.only_in_graph)
            for one in here
            if one.name and not one.library and one.category in ("activations", "inputs", "other")
        },
        _moments(device, snapshot),
        [_stepping(optimizer, device) for optimizer in snapshot.optimizers],
        _untried(here, evaluating, at, bool(models)),
    )


# ---- optimizers ------------------------------------------------------------------------------------------------------

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_FUSED = (*_ADAMS, torch.optim.SGD, torch.optim.Adagrad)


def _moments(device: str, snapshot: HeapSnapshot) -> dict[int, list[int]]:
    kinds = {type(one).__name__ for one in snapshot.optimizers if type(one) in _ADAMS and not _amsgrad(one)}
    found = {}
    for one in snapshot.held.values():
        kind, _, state = one.owner.partition("'s ")
        if one.device == device and kind in kinds and state in ("exp_avg", "exp_avg_sq"):
            size = getattr(torch, one.dtype).itemsize
            found[one.address] = eight_bit_bytes(one.nbytes // size, size)
    return found


def _one_has_not_stepped(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether some optimizer has not stepped, as far as states show it: plain SGD has none."""
    telling = (one for one in optimizers if type(one) is not torch.optim.SGD or one.defaults["momentum"])
    return any(_lacks_states(one) for one in telling)


def _lacks_states(optimizer: torch.optim.Optimizer) -> bool:
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if not optimizer.state or any(p not in optimizer.state for p in stepped):
        return True
    return len({len(state) for state in optimizer.state.values()}) > 1  # it makes them, one after the other


def _amsgrad(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("amsgrad") for group in optimizer.param_groups)


def _stepping(optimizer: torch.optim.Optimizer, device: str) -> Stepping:
    groups = optimizer.param_groups
    mine = [p for group in groups for p in group["params"] if p.requires_grad]
    stepped = [p for p in mine if p.grad is not None] or mine  # gradients may be none at the moment
    plain = all(
        str(p.device) == device and p.is_floating_point() and (p.grad is None or type(p.grad) is torch.Tensor)
        for p in stepped
    )
    loops = not any(
        group.get("fused") or group.get("differentiable") or group.get("capturable") for group in groups
    )
    kind = type(optimizer).__name__
    fusable = type(optimizer) in _FUSED and loops and plain and bool(stepped)
    if type(optimizer) not in _ADAMS or _amsgrad(optimizer) or not loops or not plain:
        return Stepping(kind, len(stepped), fusable)
    sizes = [(p.numel(), p.element_size()) for p in stepped]
    moments = [count * size for count, size in sizes for _ in range(2)]
    # torch's foreach step makes a copy of each group's parameters; its loop, of one parameter two.
    if all(group.get("foreach") in (None, True) for group in groups):
        passing = [count * size for count, size in sizes]
    else:
        passing = [max((count * size for count, size in sizes), default=0)] * 2
    steps = [4] * len(sizes)
    codes = [part for count, size in sizes for _ in range(2) for part in eight_bit_bytes(count, size)]
    return Stepping(
        kind,
        len(stepped),
        fusable,
        FirstStepRequests(moments, passing),
        FirstStepRequests([*moments, *steps], []),
        FirstStepRequests([*codes, *steps], []),
    )


# ---- what no recording can show --------------------------------------------------------------------------------------


def _untried(here: list[LiveTensor], evaluating: bool, at: Location, trained: bool) -> list[str]:
    if evaluating and torch.is_grad_enabled() and at.phase == "forward":
        return ["torch.no_grad() around the evaluation"]
    if not trained or at.phase == "optimizer step":
        return []
    batch = _batch(here, at.rows)
    found = [f"a batch smaller than {batch}, which changes the training"] if batch else []
    return [*found, "memopt.auto_checkpoint", "memopt.offload_activations"]


def _batch(here: list[LiveTensor], rows: frozenset[int]) -> int:
    """Return the first dimension with the most bytes of activations, if it is a batch size, else 0.

    It counts as one if it is a loader's batch size or an input's first dimension: a parameter's and an attention head's
    first dimensions are none. Inputs are the arguments of the running module or, after the forward pass, the program's
    other tensors.
    """
    bytes_of: Counter[int] = Counter()
    inputs = set(rows)
    for tensor in here:
        if len(tensor.shape) > 1 and tensor.category == "activations":
            bytes_of[tensor.shape[0]] += tensor.nbytes
        elif len(tensor.shape) > 1 and tensor.category == "inputs" and not rows and not tensor.only_in_graph:
            inputs.add(tensor.shape[0])
    # A loader's: the loop has the loader's iterator, which has this.
    loaders = {one.batch_size for one in gc.get_objects() if type(one) is BatchSampler}
    size = max(bytes_of, key=lambda first: bytes_of[first], default=0)
    return size if size > 1 and size in (loaders or inputs) else 0


LEAST_IN_EIGHT_BITS = 4096  # elements of a parameter whose states have 8 bits: min_8bit_size


def eight_bit_bytes(elements: int, element_size: int) -> list[int]:
    """Return the bytes of each tensor of one moment of a parameter: codes and scales, or the moment itself."""
    if elements < LEAST_IN_EIGHT_BITS:
        return [elements * element_size]
    return [elements, 4 * -(-elements // BLOCK)]
