"""Checkpointing of a model by the fastest schedule whose live bytes stay within a budget."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from memopt import _C
from memopt._checkpoint.checked_plan import Candidate, Forward, budget_bytes, checked_plan
from memopt._checkpoint.plan import Plan
from memopt._checkpoint.runner import ChainRunner
from memopt._checkpoint.stages import ranks
from memopt._checkpoint.stages.costs import device_of, tensors_in
from memopt._checkpoint.stages.measure import ChainMeasurement, Loss, default_loss
from memopt._checkpoint.stages.model_chain import Member, ModelChain, forwards
from memopt._checkpoint.stages.module_state import Snapshot
from memopt._offload.schedule_sets import ScheduleOffload, bandwidth, destination
from memopt._runtime.state_snapshot import preserve_state
from memopt.optim._state_bytes import OptimizerBytes, foretold


class StageForward:
    """The `forward` attribute of a module in the chain; it runs the stage by the plan."""

    def __init__(self, runner: ChainRunner, member: Member, distributed: bool) -> None:
        """Make a stage's forward. distributed: whether parameters were sharded over ranks when the plan was made."""
        self.runner, self.member = runner, member
        self._checked = distributed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile would take the runner's own code apart. It is large, and here once anything is compiled.
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None and hasattr(dynamo, "disable"):
            return dynamo.disable(self.run)(*args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.member.forward(*args, **kwargs)
        if not self._checked:
            if ranks.is_distributed(self.member.module):
                raise RuntimeError(
                    f"{self.member.name} was sharded over ranks after auto_checkpoint(), whose plan covers this rank "
                    "only: call auto_checkpoint() after fully_shard() and parallelize_module(), on every rank"
                )
            self._checked = True
        return self.member.call(self.runner.run, args, kwargs)


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def auto_checkpoint(
    model: torch.nn.Module,
    sample: Any,
    *,
    memory_budget: int | float | str,
    optimizer: torch.optim.Optimizer | int | str | None = None,
    loss: Loss = default_loss,
    accumulate: bool = False,
    slots: int = 500,
    to: str | os.PathLike[str] | None = None,
    offload: str | os.PathLike[str] | None = None,
) -> torch.nn.Module:
    """Make the model run its stages by the fastest recomputation schedule whose live bytes stay within a budget.

    The chain of stages is found by watching one forward pass. Then each stage is measured, in two passes and a few runs
    of every stage. A plan is tested by three steps of the model: forward, loss and backward, with memory of the size of
    the optimizer's state in the place of its step. If they take more than the budget, the chain is solved again for
    less, up to eight times. All this leaves the model as it was.

    The model's parameters, names, state_dict, hooks, train() and eval() stay as they were, and gradients are bit-equal
    to those of the plain run. Without a graph (torch.no_grad) the model runs as before. `model.plan` describes the
    decision. A batch of another shape than the sample's gives right results too, with another peak. A second call makes
    a new plan; if it fails, the old plan stays. undo_checkpoint() removes it. On a CUDA device the peaks in torch's
    statistics are reset.

    Saved tensors depend on autocast: where the training uses it, call this under autocast too. Stages of a model that
    is compiled afterwards run uncompiled.

    Effects of a forward on its modules (buffers, other tensors, numbers, lists and dictionaries that are attributes),
    on objects that it is given (a cache of keys and values), and on Python's and NumPy's random states, happen once,
    however often a stage runs. The copies needed for that count in the budget. Effects elsewhere (globals, other
    objects, a parameter changed in place through `.data`) happen again in every run of the stage.

    For a model in several processes: call it before DistributedDataParallel, on each rank for itself; or after
    fully_shard() and parallelize_module(), on every rank. The ranks then agree on one plan, by the largest measurement
    of any of them and the smallest budget. Bytes are those of a rank's own shards, and of what is gathered while a
    stage runs.

    Args:
        model: The module to checkpoint, in place.
        sample: A batch like those of the training: one argument, a tuple of arguments, or a mapping of keyword
            arguments.
        memory_budget: Most bytes that may be allocated at once in a training step, as the device's allocator counts
            them: parameters, gradients, buffers, the sample, the loss's inputs, activations, the optimizer's state and
            its step's temporaries. An int, "8GiB", or a fraction (a float) of the device's memory.
        optimizer: The optimizer, before or after its first step; or the bytes of its state; None for none.
        loss: A function from the model's output to a scalar; by default the output's `loss`, or the sum of its tensors
            that need a gradient.
        accumulate: Whether gradients exist when a step begins, from other batches or as zeros. If not, each parameter's
            gradient counts from its backward on.
        slots: Number of units that the budget is divided into for the solver; sizes are rounded up to them.
        to: The place where stages may keep their saved sets until their backward, if that is faster than recomputing
            them: "cpu" for a model on a CUDA device (pinned host memory), or a directory's path on a disk. Copies run
            beside the computation; their speed is measured first.
        offload: The earlier name of `to`.

    Returns:
        The same module.

    Raises:
        memopt.chain.InfeasibleBudget: No schedule fits; the message names the least feasible budget.
        ValueError: memory_budget, optimizer or to cannot be read; the model has no chain, its layers are
            offloaded, or it is compiled as a whole; or a stage cannot run again (it computes gradients in its own
            forward, for instance).
        OSError: The disk cannot be written to.
        RuntimeError: By a later training step: a stage changes a buffer that it did not change with the sample (in
            eval(), for instance).

    Example:
        >>> memopt.auto_checkpoint(model, batch, memory_budget="8GiB", optimizer=optimizer)
        >>> print(model.plan)
    """
    if offload is not None:
        warnings.warn(
            "the argument offload= of auto_checkpoint() is now named to=", DeprecationWarning, stacklevel=2
        )
        to = offload if to is None else to
    refuse_offloaded(model)
    refuse_compiled(model)
    args, kwargs = sample_arguments(sample)
    standing = tensors_in((list(model.parameters()), list(model.buffers()), args, kwargs))
    device = device_of(standing)
    budget = budget_bytes(memory_budget, device)
    place = destination(to, device)
    with preserve_state(model):
        state = (
            foretold(optimizer)
            if isinstance(optimizer, torch.optim.Optimizer)
            else OptimizerBytes([], [], [], _C.parse_size(optimizer or 0))
        )
    earlier = installed(model)
    undo_checkpoint(model)
    try:
        members, plan = make_plan(
            model, args, kwargs, loss, budget, slots, place, beside=state, accumulate=accumulate
        )
    except BaseException:
        for module, name, value in earlier:
            module.__dict__[name] = value
        raise
    for module, forward in zip(*stand_ins(plan, members, ranks.is_distributed(model)), strict=True):
        module.__dict__["forward"] = forward
    model.__dict__["plan"] = plan
    return model


def refuse_offloaded(model: torch.nn.Module) -> None:
    """Raise ValueError for a model with offloaded layers.

    A plan measures parameters on the device, and runs stages again when their layers are not there.
    """
    from memopt._offload.layers import offloaded  # which asks this file for plans

    if (name := offloaded(model)) is not None:
        raise ValueError(
            f"auto_checkpoint: {name or 'the model'} is offloaded by offload_layers(), which auto_checkpoint() cannot "
            "plan for: .remove() its handle first, or offload activations with memopt.offload_activations()"
        )


def refuse_compiled(model: torch.nn.Module) -> None:
    """Raise ValueError for a model compiled as a whole: its code calls none of the model's modules."""
    if "_orig_mod" in model._modules or model._compiled_call_impl is not None:
        raise ValueError(
            "auto_checkpoint: the model is compiled by torch.compile(), whose code calls none of the model's "
            "modules: compile its blocks instead (model.blocks[i] = torch.compile(model.blocks[i])) and pass "
            "auto_checkpoint() the model that contains them; a model compiled after auto_checkpoint() runs its "
            "stages uncompiled"
        )


def make_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss,
    budget: int,
    slots: int,
    to: str | None,
    *,
    beside: OptimizerBytes,
    accumulate: bool,
) -> tuple[list[Member], Plan]:
    """Return the modules of the model's chain and the plan for its stages.

    beside: memory that lives throughout and is not the model's.
    """
    distributed = ranks.is_distributed(model)
    with (
        preserve_state(model),
        Snapshot(model.modules(), parameters=not ranks.is_sharded(model)),
    ):
        found = ModelChain(model, args, kwargs)
        measured = ChainMeasurement(found, loss)
        speed = None if to is None else bandwidth(to, measured.device)
        if distributed:
            budget, speed = ranks.agree(measured, budget, speed)
        modules = [member.module for member in found.members for _ in member.names()]
        gathers = ranks.gathers(model, modules)

        def forward_by(candidate: Candidate) -> Forward:
            plan, operations, passing = candidate
            if not plan.keeps_all:
                offload = None if to is None else ScheduleOffload(to, plan.offload_slots)
                plan.runner = ChainRunner(
                    found.functions, operations, passing, found.changing, offload, gathers, found.state
                )

            def forward() -> tuple[Any, torch.Tensor]:
                with torch.enable_grad(), forwards(*stand_ins(plan, found.members, distributed)):
                    out = model(*args, **kwargs)
                    return out, loss(out)

            return forward

        plan, *_ = checked_plan(
            measured,
            budget,
            slots,
            beside=beside,
            accumulate=accumulate,
            whose=type(model).__name__,
            forward_by=forward_by,
            speed=speed,
            distributed=distributed,
        )
    plan.offload = to
    return found.members, plan


def stand_ins(
    plan: Plan, members: list[Member], distributed: bool
) -> tuple[list[torch.nn.Module], list[StageForward]]:
    """Return modules of the chain and the forwards that run them by the plan; none if it keeps everything."""
    if plan.runner is None:
        return [], []
    return [m.module for m in members], [StageForward(plan.runner, member, distributed) for member in members]


def installed(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return the attributes that auto_checkpoint() set on the model, as (module, attribute, value)."""
    found: list[tuple[torch.nn.Module, str, Any]] = [
        (module, "forward", forward)
        for module in model.modules()
        if isinstance(forward := module.__dict__.get("forward"), StageForward)
    ]
    if isinstance(plan := model.__dict__.get("plan"), Plan):
        found.append((model, "plan", plan))
    return found


def undo_checkpoint(model: torch.nn.Module) -> torch.nn.Module:
    """Remove everything that auto_checkpoint() put on the model; without it nothing happens.

    Args:
        model: The module that auto_checkpoint() was called with.

    Returns:
        The same module.
    """
    for module, name, value in installed(model):
        del module.__dict__[name]
        if isinstance(value, StageForward):
            own = value.member.forward
            if getattr(own, "__func__", None) is not getattr(type(module), "forward", None):
                module.__dict__["forward"] = own
    return model
