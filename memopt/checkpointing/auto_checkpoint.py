"""Checkpoints a model by the fastest schedule whose live bytes stay within a budget."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from memopt import _C
from memopt.checkpointing import stages_on_ranks
from memopt.checkpointing.bandwidth import bandwidth, destination
from memopt.checkpointing.chain_offload import ChainOffload
from memopt.checkpointing.chain_runner import ChainRunner
from memopt.checkpointing.checked_plan import Candidate, Step, checked_plan
from memopt.checkpointing.measure_chain import ChainMeasurement, Loss, default_loss, nothing_changes
from memopt.checkpointing.model_chain import Member, ModelChain, forwards
from memopt.checkpointing.module_state import Snapshot
from memopt.checkpointing.plan import Plan
from memopt.checkpointing.planning import budget_bytes
from memopt.checkpointing.stage_costs import device_of, tensors_in
from memopt.optim.state_bytes import OptimizerBytes, foretold


class StageForward:
    """Stands in a module of the chain as its `forward`; the module's own is the member's."""

    def __init__(self, runner: ChainRunner, member: Member, spread: bool) -> None:
        """spread: over ranks, when the plan was made."""
        self.runner, self.member = runner, member
        self._checked = spread

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
            if stages_on_ranks.is_spread(self.member.module):
                raise RuntimeError(
                    f"{self.member.name} was spread over ranks after auto_checkpoint(), whose plan is this rank's "
                    "alone: call auto_checkpoint() after fully_shard() and parallelize_module(), on every rank"
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
    offload: str | os.PathLike[str] | None = None,
) -> torch.nn.Module:
    """Makes the model run its stages by the fastest schedule of recomputation whose live bytes stay within a budget.

    sample: a batch like those of the training: one argument, a tuple of arguments, or a mapping of keyword arguments.
    memory_budget: bytes, "8GiB", or a fraction (a float) of the device's memory: all that lives at once in a training
    step, as the device's allocator counts it: the parameters, their gradients, buffers, the sample, what the loss
    reads, the optimizer's state and what its step takes besides.
    optimizer: whose state that is, before its first step or after; or the state's bytes; None: there is none. loss:
    what makes a scalar of the model's output; default: the output's `loss`, or the sum of its tensors that need a
    gradient. accumulate: whether gradients are there when a step begins, from other batches or as zeros; else each
    parameter's counts from its backward on. slots: units that the budget is divided into to solve; sizes are rounded up
    to them. offload: where stages may keep what they saved until their backward, where that is faster than to run them
    again: "cpu" for a model on a CUDA device (pinned memory of the host, copied beside the computation), or for one on
    the CPU the path of a directory on a disk; how fast that is is measured first.

    The chain is found by watching one forward pass, then each stage is measured: two passes and a few runs of every
    stage. A plan is tried by three steps of the model, loss and backward pass among them but not the optimizer's step,
    with memory of its state's size in its place; where they take more than the budget, it is solved again for less, up
    to eight times. All that leaves the model as it was. What is saved depends on autocast: where the training uses it,
    call this under it too. Returns the same module: parameters, names, state_dict, hooks, train() and eval() are as
    before, `.plan` says what was decided, gradients are bit-equal to the plain run's, and without a graph nothing is
    different. What a forward changes in its modules (buffers, other tensors, numbers, lists and dictionaries under a
    name of theirs), and Python's and NumPy's random numbers, count once however often a stage runs; copies of it count
    in the budget. What it changes elsewhere (globals, objects of other kinds, a parameter in place by `.data`), a stage
    that runs again changes again. Stages of a model that is compiled afterwards run uncompiled. A batch of another
    shape than the sample's is right too, with another peak. Calling it again makes a new plan, or leaves the one there
    is where that fails; undo_checkpoint() takes it off. On a CUDA device the peaks in torch's statistics are reset.

    A model in several processes: before DistributedDataParallel, each rank for itself; after fully_shard() and
    parallelize_module(), on every rank, which then agree on one plan, by the most that any of them has measured and the
    least budget. Bytes are those of a rank's own shards, and of what is gathered while a stage runs.

    Raises memopt.chain.InfeasibleBudget, naming the least feasible budget, ValueError where memory_budget, optimizer or
    offload cannot be read, the model has no chain, its layers are offloaded, it is compiled as a whole or a stage
    cannot run again (it takes gradients within its own forward, say), and OSError where a disk cannot be written to. A
    step raises RuntimeError where a stage changes a buffer that it did not change on the sample (in eval(), say)."""
    refuse_offloaded(model)
    refuse_compiled(model)
    args, kwargs = sample_arguments(sample)
    standing = tensors_in((list(model.parameters()), list(model.buffers()), args, kwargs))
    device = device_of(standing)
    budget = budget_bytes(memory_budget, device)
    to = destination(offload, device)
    with nothing_changes(model.parameters(), model.buffers()):
        state = (
            foretold(optimizer)
            if isinstance(optimizer, torch.optim.Optimizer)
            else OptimizerBytes([], [], [], _C.parse_size(optimizer or 0))
        )
    earlier = installed(model)
    undo_checkpoint(model)
    try:
        members, plan = make_plan(
            model, args, kwargs, loss, budget, slots, to, beside=state, accumulate=accumulate
        )
    except BaseException:
        for module, name, value in earlier:
            module.__dict__[name] = value
        raise
    for module, forward in zip(*stand_ins(plan, members, stages_on_ranks.is_spread(model)), strict=True):
        module.__dict__["forward"] = forward
    model.__dict__["plan"] = plan
    return model


def refuse_offloaded(model: torch.nn.Module) -> None:
    """A plan measures parameters where they are, and runs stages when their layers are not visiting."""
    from memopt.offloading.layers import offloaded  # which asks this file for plans

    if (name := offloaded(model)) is not None:
        raise ValueError(
            f"auto_checkpoint: {name or 'the model'} is offloaded by offload_layers(), whose visits no plan knows of: "
            ".remove() its handle first, or let activations leave by memopt.offload_activations()"
        )


def refuse_compiled(model: torch.nn.Module) -> None:
    """Its forward is torch.compile's, in which no module of the model is called by another."""
    if "_orig_mod" in model._modules or model._compiled_call_impl is not None:
        raise ValueError(
            "auto_checkpoint: the model is compiled by torch.compile(), whose code calls none of its modules: compile "
            "its blocks instead (model.blocks[i] = torch.compile(model.blocks[i])) and give auto_checkpoint() the "
            "model around them; what is compiled after auto_checkpoint() runs its stages uncompiled"
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
    """The modules of the model's chain, and how to run its stages. beside: what lives all the time, and is not the
    model's."""
    spread = stages_on_ranks.is_spread(model)
    with (
        nothing_changes(model.parameters(), model.buffers()),
        Snapshot(model.modules(), parameters=not stages_on_ranks.is_sharded(model)),
    ):
        found = ModelChain(model, args, kwargs)
        measured = ChainMeasurement(found, loss)
        speed = None if to is None else bandwidth(to, measured.device)
        if spread:
            budget, speed = stages_on_ranks.agree(measured, budget, speed)
        modules = [member.module for member in found.members for _ in member.names()]
        gathers = stages_on_ranks.gathers(model, modules)

        def run_by(candidate: Candidate) -> Step:
            plan, operations, passing = candidate
            if not plan.keeps_all:
                offload = None if to is None else ChainOffload(to, plan.offload_slots)
                plan.runner = ChainRunner(
                    found.functions, operations, passing, found.changing, offload, gathers, found.state
                )

            def forward() -> tuple[Any, torch.Tensor]:
                with torch.enable_grad(), forwards(*stand_ins(plan, found.members, spread)):
                    out = model(*args, **kwargs)
                    return out, loss(out)

            return Step(forward, lambda held: held[1].backward())

        plan, *_ = checked_plan(
            measured,
            budget,
            slots,
            beside=beside,
            accumulate=accumulate,
            whose=type(model).__name__,
            run_by=run_by,
            speed=speed,
            spread=spread,
        )
    plan.offload = to
    return found.members, plan


def stand_ins(
    plan: Plan, members: list[Member], spread: bool
) -> tuple[list[torch.nn.Module], list[StageForward]]:
    """Modules of the chain, and the forwards by which the plan runs them; none where it keeps all."""
    if plan.runner is None:
        return [], []
    return [m.module for m in members], [StageForward(plan.runner, member, spread) for member in members]


def installed(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """What auto_checkpoint() put on the model: (module, attribute, value)."""
    found: list[tuple[torch.nn.Module, str, Any]] = [
        (module, "forward", forward)
        for module in model.modules()
        if isinstance(forward := module.__dict__.get("forward"), StageForward)
    ]
    if isinstance(plan := model.__dict__.get("plan"), Plan):
        found.append((model, "plan", plan))
    return found


def undo_checkpoint(model: torch.nn.Module) -> torch.nn.Module:
    """Takes off what auto_checkpoint() put on the model; nothing happens where it put nothing. Returns the model."""
    for module, name, value in installed(model):
        del module.__dict__[name]
        if isinstance(value, StageForward):
            own = value.member.forward
            if getattr(own, "__func__", None) is not getattr(type(module), "forward", None):
                module.__dict__["forward"] = own
    return model
