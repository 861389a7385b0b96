"""Checkpointing of a model by the fastest schedule whose live bytes stay within a budget."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memopt._checkpoint.plan import SLOTS, Plan
from memopt._checkpoint.shape_plans import PlannedForward, PlanRequest, ShapePlan, StageForward
from memopt._checkpoint.stages.costs import device_of, tensors_in
from memopt._checkpoint.stages.measure import Loss, default_loss
from memopt._checkpoint.stages.module_forwards import own_forward, restore_forward
from memopt._offload.schedule_sets import destination
from memopt._offload.visits import NAME, residency_of
from memopt._runtime import arguments


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
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | int | str | None = None,
    loss: Loss = default_loss,
    accumulate: bool = False,
    slots: int = SLOTS,
    to: str | os.PathLike[str] | None = None,
    strict: bool = False,
    keeps_output: bool = True,
    host_memory: int | str | None = None,
    offload: str | os.PathLike[str] | None = None,
) -> torch.nn.Module:
    """Make the model run its stages by the fastest recomputation schedule whose live bytes stay within a budget.

    The chain of stages is found by watching one forward pass. Then each stage is measured, in two passes and a few runs
    of every stage. A plan is tested by three steps of the model: forward, loss and backward, with memory of the size of
    the optimizer's state in the place of its step. If they take more than the budget, the chain is solved again for
    less, up to eight times. All this leaves the model as it was.

    The model's parameters, names, state_dict, hooks, train() and eval() stay as they were, and gradients are bit-equal
    to those of the plain run, unless to="8bit". Without a graph (torch.no_grad) the model runs as before. `model.plan`
    describes the decision. A second call makes a new plan; if it fails, the old plan stays. undo_checkpoint() removes
    it. On a CUDA device the peaks in torch's statistics are reset. A model that is compiled afterwards runs uncompiled.

    A plan serves all batches that are in no dimension larger than its sample, of the same types, under the same
    autocast and mode. For another one the model is planned anew before it runs, with that batch as the sample: some
    tens of steps' time. Calls less than half as large get a plan of their own once recomputation by the larger one has
    cost more than planning does. So give the largest batch first. Hooks run in planning's steps too, but for those of
    Tensor.register_post_accumulate_grad_hook, which may step parameters. Models sharded over ranks or with
    SyncBatchNorm are not planned anew: they warn, and run by the plan there is.

    Later steps are watched too: `model.plan.check()` tells the most bytes that the allocator gave in one. After a step
    above the budget, with gradients of an earlier batch say, or tensors that trial steps did not make, the next call is
    planned for that much less.

    Effects of a forward on its modules (buffers, other tensors, numbers, lists and dictionaries that are attributes),
    on objects that it is given (a cache of keys and values), and on Python's and NumPy's random states, happen once,
    however often a stage runs. The copies needed for that count in the budget. Effects elsewhere (globals, other
    objects, a parameter changed in place through `.data`) happen again in every run of the stage.

    For a model that memopt.offload_layers() keeps off the device, call it after that: bytes are then those on the
    device, a stage's parameters among them while it runs, and each of its runs has the time of their copies. What the
    plan leaves of the budget keeps parameters on the device and fetches them ahead.

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
        optimizer: The optimizer, before or after its first step; a function of parameters that returns one, such as
            torch.optim.AdamW; or the bytes of its state; None for none.
        loss: A function from the model's output to a scalar; by default the output's `loss`, or the sum of its tensors
            that need a gradient. It is called with other batches' outputs when these are planned for.
        accumulate: Whether gradients exist when a step begins, from other batches or as zeros. If not, each parameter's
            gradient counts from its backward on.
        slots: Number of units that the budget is divided into for the solver; sizes are rounded up to them.
        to: The place where stages may keep their saved sets until their backward, and their inputs until they run
            again, if that is faster than recomputing them: "cpu" for a model on a CUDA device (pinned host memory), or
            a directory's path on a disk. Copies run beside the computation; their speed is measured first. Or "8bit":
            on the device as codes of 8 bits, as memopt.offload_activations(to="8bit") has them, of what a stage alone
            holds. Gradients change by that; the time that coding takes, which is measured, is added to the stage's.
        strict: Raise for a later batch that no plan fits, and after a step above the budget. If not, the batch runs by
            a plan for little more than the least, with a warning.
        keeps_output: Whether the model's output lives until the step is over, as with `out = model(x)` in a loop's
            body. False where it is gone once the loss is computed, as in `loss = F.cross_entropy(model(x), y)`.
        host_memory: The most bytes of pinned memory that stages take with to="cpu" (bytes or text); None for no limit.
            Where the fastest schedule would take more, nothing is offloaded.
        offload: The earlier name of `to`.

    Returns:
        The same module.

    Raises:
        memopt.chain.InfeasibleBudget: No schedule fits; the message names the least feasible budget. Also raised by a
            later call of the model, where strict.
        ValueError: memory_budget, optimizer, to or host_memory cannot be read; the model has no chain, only a part of
            it is offloaded by offload_layers(), or it is compiled as a whole; or a stage cannot run again (it computes
            gradients in its own forward, for instance).
        OSError: The disk cannot be written to.
        RuntimeError: By a later training step: a stage changes a buffer that it did not change with the sample (in
            eval(), for instance); or, where strict, the step before took more than the budget.

    Examples:
        >>> memopt.auto_checkpoint(model, batch, memory_budget="8GiB", optimizer=optimizer)
        >>> print(model.plan)
        >>> memopt.auto_checkpoint(model, batch, memory_budget="8GiB", optimizer=optimizer, to="8bit")
    """
    if offload is not None:
        warnings.warn(
            "the argument offload= of auto_checkpoint() is now named to=", DeprecationWarning, stacklevel=2
        )
        to = offload if to is None else to
    arguments.check_module(model, "auto_checkpoint: model", ", followed by a sample of its input")
    arguments.check_function(loss, "auto_checkpoint: loss", "the model's output that returns one number")
    device = planned_device(model, sample)
    request = PlanRequest(
        arguments.budget(memory_budget, device),
        to=destination(to, device),
        optimizer=_reference(optimizer, model),
        loss=loss,
        slots=slots,
        accumulate=accumulate,
        strict=strict,
        keeps_output=keeps_output,
        host_memory=None if host_memory is None else arguments.size(host_memory, "host_memory"),
    )
    plan_model(model, sample, request)
    return model


def _reference(optimizer: Any, model: torch.nn.Module) -> Callable[[], torch.optim.Optimizer | None] | int:
    made = optimizer(model.parameters()) if callable(optimizer) else optimizer
    if isinstance(made, torch.optim.Optimizer):
        return weakref.ref(made) if made is optimizer else lambda: made  # which nobody else keeps
    if not isinstance(optimizer, int | str | None):
        what = "optimizer" if made is optimizer else "optimizer's result"
        said = f"{what} is {arguments.shown(made)}"
        raise TypeError(
            f"auto_checkpoint: {said}: give the optimizer, a function of parameters that returns one, such as "
            "torch.optim.AdamW, or the bytes of its states"
        )
    return arguments.size(optimizer or 0, "optimizer")


def planned_device(model: torch.nn.Module, sample: Any) -> torch.device:
    """Return the device whose bytes a model's plan is about. Raises ValueError where it can have none."""
    refuse_offloaded_part(model)
    refuse_compiled(model)
    if (residency := residency_of(model)) is not None:
        return residency.device
    return device_of(tensors_in((list(model.parameters()), list(model.buffers()), *sample_arguments(sample))))


def plan_model(model: torch.nn.Module, sample: Any, request: PlanRequest) -> None:
    """Have the model run by the plan that is asked for. If there is none, it stays as it was."""
    residency = residency_of(model)
    earlier = installed(model)
    undo_checkpoint(model)
    try:
        planned = request.plan(model, *sample_arguments(sample))
    except BaseException:
        for module, name, value in earlier:
            module.__dict__[name] = value
        if residency is not None and not earlier:
            residency.carrier.plan(None)
        raise
    run_by_plan(model, request, planned)


def run_by_plan(model: torch.nn.Module, request: PlanRequest, planned: ShapePlan) -> None:
    """Have a plain model run by a plan, and by further ones, made by the request, for calls that it does not cover."""
    model.__dict__["forward"] = PlannedForward(model, own_forward(model), request, [planned])


def refuse_offloaded_part(model: torch.nn.Module) -> None:
    """Raise ValueError for a model that offload_layers() was not given, but a part of it, or what it is in."""
    from memopt._offload.layers import ModelCall, offloaded  # which asks this package for plans

    name = offloaded(model)
    if name is not None and not isinstance(model.__dict__.get(NAME), ModelCall):
        raise ValueError(
            f"auto_checkpoint: {name or 'the model'} is offloaded by offload_layers(), which was given another module: "
            "give both the same one. .remove() the handle that offload_layers() returned first"
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


def installed(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return the attributes that auto_checkpoint() set on the model, as (module, attribute, value)."""
    found: list[tuple[torch.nn.Module, str, Any]] = [
        (module, "forward", forward)
        for module in model.modules()
        if isinstance(forward := module.__dict__.get("forward"), (StageForward, PlannedForward))
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
    if (residency := residency_of(model)) is not None:
        residency.carrier.plan(None)
    for module, name, value in installed(model):
        del module.__dict__[name]
        if name == "forward":
            restore_forward(module, value.own)
    return model
