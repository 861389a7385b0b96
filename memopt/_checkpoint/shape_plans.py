"""A planned model's plans, one for each kind and size of arguments; a batch larger than planned is planned first.

A plan serves every call whose arguments have the same structure and types, under the same autocast and mode, and are in
no dimension larger than those that it was made for: they take no more memory. Any other call is planned before it runs,
with its arguments as the sample. A call less than half as large as its plan's gets a plan of its own once such calls
have lost more time to recomputation, by the plan's own figures, than planning takes.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.checked_plan import Candidate, Forward, checked_plan
from memopt._checkpoint.plan import SLOTS, Plan
from memopt._checkpoint.runner import ChainRunner, changeable
from memopt._checkpoint.stages import ranks
from memopt._checkpoint.stages.costs import device_of
from memopt._checkpoint.stages.measure import ChainMeasurement, Loss, default_loss
from memopt._checkpoint.stages.model_chain import Member, ModelChain
from memopt._checkpoint.stages.module_forwards import forwards, restore_forward
from memopt._checkpoint.stages.module_state import Snapshot
from memopt._checkpoint.stages.trace_forward import SIMPLE, autocast_kinds, autocast_of
from memopt._checkpoint.step_peak import StepPeak, gradient_bytes
from memopt._offload.schedule_sets import ScheduleOffload, bandwidth
from memopt._offload.visits import residency_of
from memopt._runtime.log import logger
from memopt._runtime.state_snapshot import preserve_state
from memopt.chain import InfeasibleBudget
from memopt.optim._backward_steps import steps_at_once
from memopt.optim._offloaded_gradients import sends_to_host
from memopt.optim._state_bytes import OptimizerBytes, foretold

MOST_PLANS = 32  # besides that of the sample
MOST_REPLACED = 2  # times that a plan is replaced by one for less
SMALL = 0.5  # of the elements that a plan was made for: calls below may be worth a plan of their own


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that torch.compile does not take apart."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # large, and here once anything is compiled
    return dynamo.disable(function) if dynamo is not None and hasattr(dynamo, "disable") else function  # type: ignore[no-any-return]


class StageForward:
    """The `forward` attribute of a module in the chain; it runs the stage by the plan."""

    def __init__(self, runner: ChainRunner, member: Member, distributed: bool) -> None:
        """Make a stage's forward. distributed: whether parameters were sharded over ranks when the plan was made."""
        self.runner, self.member = runner, member
        self._checked = distributed

    @property
    def visits(self) -> bool:
        """Return whether the stages bring parameters that are offloaded."""
        return self.member.visits

    @property
    def own(self) -> Any:
        """Return the module's own forward."""
        return self.member.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return uncompiled(self.run)(*args, **kwargs)

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


class LossError(Exception):
    """The loss that auto_checkpoint() was given cannot be computed for another batch's output."""


@dataclass
class AnyLoss:
    """A loss as planning for a later batch calls it; it may be one of the sample's targets alone."""

    loss: Loss

    def __call__(self, out: Any) -> torch.Tensor:
        try:
            return self.loss(out)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise LossError(str(error)) from error


# ---- one plan --------------------------------------------------------------------------------------------------------


class CallShape(NamedTuple):
    """A call as far as a plan depends on it: its kind, and the size of each dimension of its tensors and each int."""

    kind: tuple[Any, ...]
    sizes: tuple[int, ...]
    elements: int

    @staticmethod
    def of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallShape:
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        sizes: list[int] = []
        kinds: list[Any] = []
        elements = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                kinds.append((leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad))
                sizes += leaf.shape
                elements += leaf.numel()
            elif (isinstance(leaf, SIMPLE) and not isinstance(leaf, (int, float))) or isinstance(leaf, bool):
                kinds.append(leaf)
            else:
                kinds.append(type(leaf))
                sizes += [leaf] if isinstance(leaf, int) else []
        state = autocast_of(autocast_kinds(leaves)), model.training
        return CallShape((spec, kinds, state), tuple(sizes), elements)

    def covers(self, other: CallShape) -> bool:
        return self.kind == other.kind and all(map(int.__ge__, self.sizes, other.sizes))


@dataclass(eq=False)
class ShapePlan:
    """A plan, and the forwards that run a model's modules by it; none if it keeps everything."""

    shape: CallShape
    plan: Plan
    forwards: dict[torch.nn.Module, StageForward]
    planning_seconds: float
    accumulates: bool = False  # gradients were there in its trial steps
    lost_seconds: float = 0.0  # to recomputation, by calls that are small for it
    replaced: int = 0  # earlier plans in whose place it is, since their steps took more than the budget

    def is_large_for(self, shape: CallShape) -> bool:
        """Return whether the call had better have a plan of its own; count it if not."""
        if shape.elements > SMALL * self.shape.elements or self.plan.runner is None:
            return False
        share = shape.elements / self.shape.elements
        self.lost_seconds += share * (self.plan.seconds - self.plan.plain_seconds)
        return self.lost_seconds > self.planning_seconds


@dataclass
class PlanRequest:
    """The arguments of auto_checkpoint(), but for the sample.

    optimizer: what returns it while it lives, or its state's bytes. or_least: a budget that is too small is taken for
    the least that would do. state_bytes: those of the optimizer when it was last seen. besides: bytes that live
    throughout, and that neither the model nor the optimizer has. host_memory: bytes for what goes to "cpu".
    """

    budget: int
    to: str | None = None
    optimizer: Callable[[], torch.optim.Optimizer | None] | int = 0
    loss: Loss = default_loss
    slots: int = SLOTS
    accumulate: bool = False
    strict: bool = False
    keeps_output: bool = True
    or_least: bool = False
    state_bytes: int = 0
    besides: int = 0
    host_memory: int | None = None

    def bytes_beside(self, model: torch.nn.Module) -> OptimizerBytes:
        """Return the optimizer's bytes, with what lives besides among those that are not seen."""
        found = self.optimizer_bytes(model)
        return found._replace(unseen=found.unseen + self.besides)

    def optimizer_bytes(self, model: torch.nn.Module) -> OptimizerBytes:
        if isinstance(self.optimizer, int):
            return OptimizerBytes([], [], [], self.optimizer)
        if (optimizer := self.optimizer()) is None:
            return OptimizerBytes([], [], [], self.state_bytes)
        residency = residency_of(model)
        with preserve_state(model):
            found = foretold(optimizer, None if residency is None else residency.device)
        self.state_bytes = found.there_bytes + sum(found.coming)
        return found

    def states_come_in_pass(self) -> bool:
        """Return whether steps within the next backward pass make states, which a plan counts as there already."""
        optimizer = None if isinstance(self.optimizer, int) else self.optimizer()
        return optimizer is not None and any(
            group.get("step_in_backward") and p.requires_grad and not optimizer.state.get(p)
            for group in optimizer.param_groups
            for p in group["params"]
        )

    def plan(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """Return the plan for these arguments of a model that runs plain. The model and they are left as they were."""
        begun = time.perf_counter()
        args, kwargs = pytree.tree_map(_with_own_graph, (args, kwargs))
        beside = self.bytes_beside(model)
        distributed = ranks.is_distributed(model)
        budget = self.budget
        if (residency := residency_of(model)) is not None:
            residency.carrier.plan(0)
        with left_as_it_is(model):
            found = ModelChain(model, args, kwargs)
            measured = ChainMeasurement(found, self.loss, keeps_output=self.keeps_output)
            speed = None if self.to is None else bandwidth(self.to, measured.device)
            if distributed:
                budget, speed = ranks.agree(measured, budget, speed)
            modules = [member.module for member in found.members for _ in member.names()]
            gathers = ranks.gathers(model, modules)

            def forward_by(candidate: Candidate) -> Forward:
                return planned_forward(candidate, measured, found, self.to, gathers, distributed)

            plan, *_ = checked_plan(
                measured,
                budget,
                self.slots,
                beside=beside,
                accumulate=self.accumulate,
                whose=type(model).__name__,
                forward_by=forward_by,
                speed=speed,
                distributed=distributed,
                or_least=self.or_least,
                host_memory=self.host_memory if self.to == "cpu" else None,
            )
        if self.or_least and plan.peak_bytes > self.budget:
            self.budget = plan.memory_budget = plan.peak_bytes  # what further calls are held to
        plan.offload = self.to
        shape = CallShape.of(model, args, kwargs)
        own = stage_forwards(plan, found.members, distributed)
        return ShapePlan(shape, plan, own, time.perf_counter() - begun, self.accumulate)


def _with_own_graph(leaf: Any) -> Any:
    """Return a tensor with a graph that begins at it, where its caller's would get gradients by trial steps."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter) or not leaf.requires_grad:
        return leaf
    return changeable(leaf.detach().requires_grad_())


@contextmanager
def left_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Leave the model as it was after steps within the context, none of which steps a parameter."""
    on_device = []
    if (residency := residency_of(model)) is not None:
        on_device.append(torch.empty(0, device=residency.device))  # whose random state counts
    with (
        preserve_state(model, parameters=on_device),
        without_steps(model.parameters()),
        Snapshot(model.modules(), parameters=not ranks.is_sharded(model)),
    ):
        yield


def planned_forward(
    candidate: Candidate,
    measured: ChainMeasurement,
    found: ModelChain,
    to: str | None,
    gathers: Any = None,
    distributed: bool = False,
) -> Forward:
    """Return the forward pass of a measured chain's model by a plan, which gets its runner."""
    plan, operations, passing = candidate
    if not plan.keeps_all:
        offload = None if to is None else ScheduleOffload(to, plan.offload_slots)
        plan.runner = ChainRunner(
            found.functions, operations, passing, found.changing, offload, gathers, found.state
        )

    def forward() -> tuple[Any, torch.Tensor]:
        own = stage_forwards(plan, found.members, distributed)
        with torch.enable_grad(), forwards(list(own), list(own.values())):
            out = found.model(*found.args, **found.kwargs)
            loss = measured.loss(out)
            return (out if measured.keeps_output else None), loss

    return forward


def stage_forwards(
    plan: Plan, members: list[Member], distributed: bool
) -> dict[torch.nn.Module, StageForward]:
    """Return the forward of each module of the chain that runs it by the plan; none if it keeps everything."""
    if plan.runner is None:
        return {}
    return {member.module: StageForward(plan.runner, member, distributed) for member in members}


# ---- all plans of a model --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PlannedForward:
    """The `forward` attribute of a planned model; it runs the model by the plan for the call's arguments.

    own: the model's forward. request: what a new plan is made by; None in a copy, which has the plans made so far.
    """

    model: torch.nn.Module
    own: Callable[..., Any]
    request: PlanRequest | None
    plans: list[ShapePlan]
    refused: list[CallShape] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.active = self.plans[0]
        self.put_on()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"request": None}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return uncompiled(self.run)(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.active.forwards.get(self.model, self.own)(*args, **kwargs)
        self.choose(args, kwargs)
        if self.request is not None and self.request.states_come_in_pass():
            return self.active.forwards.get(self.model, self.own)(*args, **kwargs)
        plan = self.active.plan
        standing = plan.standing_bytes
        if (residency := residency_of(self.model)) is not None:
            residency.carrier.plan(max(0, plan.memory_budget - plan.peak_bytes))
            standing += residency.here()
        peak = StepPeak(self.parameters(), self.device(), standing, plan.took)
        out = self.active.forwards.get(self.model, self.own)(*args, **kwargs)
        peak.until_backward_of(out)
        return out

    def parameters(self) -> list[torch.Tensor]:
        residency = residency_of(self.model)
        return list(self.model.parameters()) if residency is None else residency.parameters()

    def device(self) -> torch.device:
        residency = residency_of(self.model)
        return device_of(self.model.parameters()) if residency is None else residency.device

    def put_on(self) -> None:
        """Give the modules the forwards of the active plan."""
        for module, forward in self.active.forwards.items():
            if module is not self.model:
                module.__dict__["forward"] = forward
        self.model.__dict__["plan"] = self.active.plan

    def take_off(self) -> None:
        for module, forward in self.active.forwards.items():
            if module is not self.model and module.__dict__.get("forward") is forward:
                restore_forward(module, forward.own)

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for these arguments the active one."""
        shape = CallShape.of(self.model, args, kwargs)
        found = min(
            (one for one in self.plans if one.shape.covers(shape)),
            key=lambda one: one.shape.elements,
            default=None,
        )
        if found is None:
            able = self.can_plan(
                shape, "a batch is larger than those that auto_checkpoint() planned for, or of another kind"
            )
            found = self.plan_for(shape, args, kwargs) if able else self.largest(shape)
        elif self.request is not None and found.plan.step_bytes > found.plan.memory_budget:
            found = self.plan_for_less(found, shape, args, kwargs)
        elif found.is_large_for(shape) and self.can_plan(shape):
            found = self.smaller_plan(found, args, kwargs)
        if found is not self.active:
            self.take_off()
            self.active = found
            self.put_on()

    def largest(self, shape: CallShape) -> ShapePlan:
        """Return the plan of the largest call of this kind; of no such call the active one."""
        alike = [one for one in self.plans if one.shape.kind == shape.kind]
        return max(alike, key=lambda one: one.shape.elements, default=self.active)

    def can_plan(self, shape: CallShape, what: str = "") -> bool:
        """Return whether a plan can be made in the midst of a training step. what: has happened, to warn of if not."""
        reason = ""
        if any(shape.kind == one.kind for one in self.refused):
            return False
        if self.request is None:
            reason = "the model is a copy, or was loaded"
        elif ranks.is_distributed(self.model) or any(map(synchronizes, self.model.modules())):
            reason = "other ranks take part in each forward pass"
        elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            reason = "a CUDA graph is being captured"
        if reason and what:
            self.warn(
                f"{what}, and cannot be planned for now, since {reason}: results are correct, but the step's peak may "
                "exceed memory_budget. Call auto_checkpoint() with the largest batch"
            )
        return not reason

    def plan_for(self, shape: CallShape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """Return a plan for these arguments, which no plan covers; the largest, with a warning, where that fails."""
        assert self.request is not None
        try:
            return self.new_plan(self.request, args, kwargs)
        except LossError as error:
            text = (
                f"the loss given to auto_checkpoint() cannot be computed for a batch of another size: {error}. Give "
                "one that takes any output, such as loss=lambda out: F.cross_entropy(out, out.argmax(-1))"
            )
            if self.request.strict:
                raise ValueError(f"auto_checkpoint: {text}") from error
            self.warn(
                f"{text}. Such batches are planned for with the sum of the output, and without the loss's memory"
            )
            self.request = replace(self.request, loss=default_loss)
            return self.plan_for(shape, args, kwargs)
        except InfeasibleBudget as error:
            if self.request.strict:
                raise
            self.warn(f"{error}. This batch runs by a plan for little more than that")
            return self.new_plan(replace(self.request, budget=error.least_budget * 17 // 16), args, kwargs)
        except ValueError as error:
            if self.request.strict:
                raise
            self.warn(f"a batch cannot be planned for, and its step's peak may exceed memory_budget: {error}")
            self.refused.append(shape)
            return self.largest(shape)

    def plan_for_less(
        self, large: ShapePlan, shape: CallShape, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShapePlan:
        """Return a plan in the place of one whose own step took more than the budget; that one where there is none.

        What the step took beyond the trial steps is set aside, but for gradients, which new trial steps have too.
        """
        assert self.request is not None
        budget, taken = large.plan.memory_budget, large.plan.step_bytes
        above = (
            f"a step's peak was above memory_budget: {taken} bytes, {taken - budget} more than that and "
            f"{taken - large.plan.peak_bytes} more than in trial steps"
        )
        if self.request.strict:
            raise RuntimeError(
                f"auto_checkpoint: {above}. Raise memory_budget to {taken} or more, or make less beside the model; for "
                "gradients that were there before the step, call auto_checkpoint() with accumulate=True"
            )
        if large.replaced >= MOST_REPLACED or not self.can_plan(shape, above):
            return large
        grads = 0 if large.accumulates else gradient_bytes(self.parameters(), self.device())
        aside = max(0, taken - large.plan.peak_bytes - grads)
        try:
            found = self.new_plan(replace(self.request, budget=budget - aside), args, kwargs)
        except (LossError, ValueError) as error:
            why = (
                f"raise memory_budget to {error.least_budget + aside} or more"
                if isinstance(error, InfeasibleBudget)
                else str(error)
            )
            self.warn(f"{above}. No plan takes that much less: {why}")
            large.replaced = MOST_REPLACED
            return large
        found.plan.memory_budget = budget
        found.replaced = large.replaced + 1
        if found.shape.covers(large.shape):
            self.plans = [one for one in self.plans if one is not large]
        return found

    def smaller_plan(self, large: ShapePlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        """Return a plan for these arguments, for which `large` is slow; that one where there is none."""
        assert self.request is not None
        try:
            return self.new_plan(self.request, args, kwargs)
        except (LossError, ValueError) as error:
            logger.debug("auto_checkpoint: smaller batches get no plan of their own: %s", error)
            large.lost_seconds = -math.inf
            return large

    def new_plan(self, request: PlanRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        there = any(parameter.grad is not None for parameter in self.parameters())
        request = replace(request, loss=AnyLoss(request.loss), accumulate=request.accumulate or there)
        self.take_off()
        # This one, or what calls it, such as accelerate's autocast.
        around = self.model.__dict__.get("forward", self)
        restore_forward(self.model, self.own)
        residency = residency_of(self.model)
        try:
            with nullcontext() if residency is None else residency.between_calls():
                found = request.plan(self.model, args, kwargs)
        finally:
            self.model.__dict__["forward"] = around
            self.put_on()
        if len(self.plans) > MOST_PLANS:
            del self.plans[1]
        self.plans.append(found)
        return found

    def warn(self, text: str) -> None:
        key = text[:40]
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(f"memopt.auto_checkpoint: {text}", stacklevel=2)


@contextmanager
def without_steps(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have no hook step a parameter, as a trial's gradient is complete, within the context.

    Of memopt's own a gradient is dropped, as it would be after its step; of others' it stays.
    """
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if not all(map(sends_to_host, hooks.values())):
            held.append((hooks, dict(hooks)))
    try:
        for hooks, before in held:
            hooks.clear()
            hooks.update({key: _drop_gradient for key, hook in before.items() if steps_at_once(hook)})
        yield
    finally:
        for hooks, before in held:
            hooks.clear()
            hooks.update(before)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def synchronizes(module: torch.nn.Module) -> bool:
    """Return whether the module's forward waits for other ranks."""
    return isinstance(module, torch.nn.SyncBatchNorm)
