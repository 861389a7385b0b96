"""memopt.fit(): levers under one budget, on the live model.

The step's chain is measured for each size of micro-batch that is in question; what a combination of levers takes is
then arithmetic: of its phases (the forward pass and each stage's backward pass, and the optimizer's step) the one that
takes most. Every combination of the lowest tier that fits is priced, but for those that cannot be faster than what has
been found. The chosen one is tested by a step; where it takes more than was worked out, the search goes on with less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt import _C
from memopt._checkpoint.checked_plan import (
    SPARE,
    Candidate,
    ChainCosts,
    TrialSteps,
    budget_bytes,
    bytes_of_step,
    chain_costs,
    plan_for,
)
from memopt._checkpoint.plan import keep_all
from memopt._checkpoint.shape_plans import left_as_it_is, planned_forward
from memopt._checkpoint.stages.costs import StageSeconds, block_bytes, bytes_of
from memopt._checkpoint.stages.measure import ChainMeasurement
from memopt._checkpoint.stages.model_chain import ModelChain
from memopt._estimate.fit import ALLOWED
from memopt._estimate.search import BIT_EQUAL, FREE, OTHER, TIERS, Names, combinations, tier_of
from memopt._fit import optimizers
from memopt._fit.optimizers import OnDevice
from memopt._fit.result import Fit, Row
from memopt._fit.training_step import TrainingStep
from memopt._microbatch.split_batch import Reduction
from memopt._offload.carriers import beside
from memopt._offload.layers import _typical
from memopt._offload.model_layers import check_model, find_layers
from memopt._offload.model_layers import nbytes as layer_bytes
from memopt._offload.schedule_sets import Bandwidth, bandwidth
from memopt._run.plan import (
    CHECKPOINT,
    EIGHT_BITS,
    FOUR_BITS,
    FUSED,
    LOSS_HEAD,
    MICRO_BATCHES,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
    OPTIONS,
    STEP_IN_BACKWARD,
)
from memopt._runtime.log import logger
from memopt.chain import InfeasibleBudget
from memopt.nn._fuse_loss_head import fuse_loss_head
from memopt.optim._one_pass import OnePass
from memopt.optim._state_bytes import OptimizerBytes, foretold

NEAR = 1.5  # times the budget: what is worked out to take more is not tried
SLOTS = 500  # of a budget, for the solver
ALIKE = 1.02  # a plan with fewer levers is taken, if it takes no more than so much of the fastest one's time
TRIALS = 8  # of plans by a step
KEPT_BUFFERS = 64 << 20  # bytes of buffers that memopt.backward copies at most
RANDOM_STATES = (
    4  # that memopt.backward has at once: of the batch, of a micro-batch, and two that are compared
)
ALLOW = {**ALLOWED, "dropout": MICRO_BATCHES}


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sample: Any,
    *,
    memory_budget: int | float | str,
    loss: Callable[..., Tensor] | None = None,
    effective_batch: int | None = None,
    reduction: Reduction = "mean",
    exact: bool = False,
    allow: Collection[str] = (),
    reads_gradients: bool = False,
) -> Fit:
    """Find the levers with which a training step of this model stays within a budget, on the machine at hand.

    In question are: a schedule by which stages are kept, recomputed or offloaded (memopt.auto_checkpoint), with what
    the other levers leave of the budget; memopt's optimizer in one pass, with its gradients or states on the host, or
    with its steps in the backward pass; the loss head in chunks (memopt.nn.fuse_loss_head); layers on the host
    (memopt.offload_layers); and micro-batches with the gradients of the whole batch (memopt.backward). Of the plans
    that fit those come first that change nothing, then those with bit-equal results, then those equal to rounding; of
    one tier the fastest, without a lever that it does not need. The learning rate, the effective batch and the dtype
    are never changed. What offloads needs a CUDA device.

    Nothing is changed yet: parameters, gradients, buffers, random states and the optimizer are left as they are.
    `.apply()` changes them, and what it returns can undo that.

    Planning takes some tens of steps' time for the batch, and as much for each size of micro-batch in question; the
    device needs room for one stage at a time and for the chosen plan's step. Steps that may take up to 1.5 times the
    budget are tried too; if they run out of memory, they are not. Enter torch.autocast() around the call if the
    training does.

    Args:
        model: The module, on one CUDA device, memopt's simulated one, or the CPU; in train mode as in the training.
        optimizer: The optimizer of its parameters, before or after its first step.
        sample: A batch like those of the training: the model's inputs (a tensor, a tuple of arguments, or a mapping of
            keyword arguments), or, with `loss`, a tuple of the inputs and what the loss takes besides, as
            (inputs, targets).
        memory_budget: Most bytes of the device's tensors at once in a step, as its allocator counts them: parameters,
            buffers, gradients, the optimizer's state and its temporaries, the batch, activations, temporaries of
            operations and cuBLAS's workspaces. Not counted: the CUDA context, and what the allocator caches. An int,
            "8GiB", or a fraction (a float) of the device's memory.
        loss: A function of the model's output, and of what follows the inputs in the sample; by default the output's
            `.loss`.
        effective_batch: Samples of an optimizer's step; by default the sample's. If it has more, the step takes several
            such batches, and gradients of the earlier ones are there.
        reduction: The loss's reduction over the samples, as memopt.backward has it.
        exact: Whether results must be bit-equal to the plain training's.
        allow: What may change results beyond rounding: "8bit" and "4bit" (optimizer states), "dropout" (micro-batches
            of a model that draws random numbers, which then draw others).
        reads_gradients: Whether the training reads gradients between backward and step: clips, scales or logs them.
            They then stay where they are.

    Returns:
        A Fit: print it. `.fits` is whether there is a plan, `.code()` the lines to write; `.apply()` carries it out.

    Raises:
        ValueError: memory_budget cannot be read, or no plan can be within it, as the parameters alone take more; the
            optimizer has other parameters than the model; the sample does not run; there is no loss; a word of `allow`
            is unknown; the model is planned, offloaded, compiled, on several devices, or in several processes.
        TypeError: An argument has the wrong type, such as a list of optimizers.

    Example:
        >>> fit = memopt.fit(model, optimizer, (inputs, targets), loss=F.cross_entropy, memory_budget="8GiB")
        >>> print(fit)
        >>> with fit.apply() as handle:
        ...     for inputs, targets in loader:
        ...         handle.backward(inputs, targets)
        ...         handle.optimizer.step()
        ...         handle.optimizer.zero_grad()
    """
    unknown = [word for word in allow if word not in ALLOW]
    if isinstance(allow, str) or unknown:
        raise ValueError(
            f"memopt.fit: allow={allow!r}: expected a collection of {', '.join(map(repr, ALLOW))}"
            + (f", not {unknown[0]!r}" if unknown and not isinstance(allow, str) else "")
        )
    step = TrainingStep(model, optimizer, sample, loss, reduction, effective_batch)
    try:
        budget = budget_bytes(memory_budget, step.device)
    except ValueError as error:
        raise ValueError(f"memopt.fit: {error}") from None
    planner = Planner(step, budget, exact, {ALLOW[word] for word in allow}, reads_gradients)
    parameters = bytes_of(model.parameters())
    if budget < parameters and OFFLOAD_LAYERS not in planner.levers:
        raise ValueError(
            f"memopt.fit: memory_budget is {_C.format_size(budget)}, and the parameters alone take "
            f"{_C.format_size(parameters)} on {step.device}: raise memory_budget, or make the model smaller"
        )
    return planner.plan()


@dataclass
class Attempt:
    """What a combination of levers takes.

    in_passes, in_step: bytes at the peak of the forward and backward passes, and while the optimizer steps; least: of a
    budget that would do. tested: the most that a step took; 0 if none was taken.
    """

    names: Names
    fits: bool
    in_passes: int
    in_step: int
    seconds: float
    least: int
    states: int
    candidate: Candidate | None = None
    tested: int = 0

    @property
    def peak(self) -> int:
        return max(self.in_passes, self.in_step)


class Measured(NamedTuple):
    chain: ModelChain
    costs: ChainMeasurement


class Whole(nn.Module):
    """A model as the only stage of a chain: for one that is none itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Planner:
    """The search for a plan.

    Attributes:
        levers: Those that are in question.
        refused: Others, and why not.
    """

    def __init__(
        self, step: TrainingStep, budget: int, exact: bool, allowed: Collection[str], reads_gradients: bool
    ) -> None:
        self.step, self.budget, self.exact, self.allowed = step, budget, exact, allowed
        self.reads_gradients = reads_gradients
        self.accumulates = step.batches > 1
        self.refused: dict[str, str] = {}
        self.levers = [CHECKPOINT, *self._optimizer_levers(), *self._model_levers()]
        self.attempts: dict[Names, Attempt] = {}
        self._set_aside: dict[Names, int] = {}  # bytes, which a tested step took beyond what was worked out
        self._measured: dict[tuple[int, bool, bool], Measured] = {}
        self._beside: dict[Names, OnDevice] = {}
        self._less: dict[tuple[int, bool, bool, bool], int] = {}

    # ---- what is in question -----------------------------------------------------------------------------------------

    def _wanted(self, name: str, reason: Callable[[], str]) -> bool:
        """Return whether a lever is in question; if not, note why."""
        if self.exact and tier_of([name]) > BIT_EQUAL:
            self.refused[name] = "exact=True"
        elif tier_of([name]) == OTHER and name not in self.allowed:
            word = next(word for word, allowed in ALLOW.items() if allowed == name)
            self.refused[name] = f"changes results: allow={{{word!r}}}"
        elif why := reason():
            self.refused[name] = why
        else:
            return True
        return False

    def _optimizer_levers(self) -> Iterator[str]:
        optimizer = self.step.optimizer
        for name in (FUSED, OFFLOAD_STATES, OFFLOAD_GRADIENTS, STEP_IN_BACKWARD, EIGHT_BITS, FOUR_BITS):

            def reason(name: str = name) -> str:
                if name in (OFFLOAD_STATES, OFFLOAD_GRADIENTS) and self.step.device.type != "cuda":
                    return "the model is in the host's memory already"
                if name in (OFFLOAD_GRADIENTS, STEP_IN_BACKWARD) and self.reads_gradients:
                    return "reads_gradients=True"
                if name == STEP_IN_BACKWARD and self.accumulates:
                    return "gradients of several batches are added up"
                try:
                    kind = optimizers.counterpart_of(optimizer)
                    if name == FUSED and isinstance(optimizer, OnePass):
                        return "it is already"
                    optimizers.trial_copy(optimizer, optimizers.options_of([name]))
                except (ValueError, TypeError) as error:
                    return str(error)
                options = OPTIONS.get(name, {}).items()
                if options and all(
                    group.get(key) == value for group in optimizer.param_groups for key, value in options
                ):
                    return f"{kind.__name__} has it already"
                return ""

            if self._wanted(name, reason):
                yield name

    def _model_levers(self) -> Iterator[str]:
        def no_loss_head() -> str:
            if self.step.loss is not None:
                return "the loss is computed outside the model: call memopt.nn.linear_cross_entropy() in it"
            try:
                fuse_loss_head(self.step.model).remove()
            except (TypeError, ValueError) as error:
                return str(error).removeprefix("fuse_loss_head: ")
            return "" if self.step.model.training else "the model is in eval mode"

        def no_layers() -> str:
            if self.step.device.type != "cuda":
                return "the model is in the host's memory already"
            try:
                check_model(self.step.model)
            except (TypeError, ValueError) as error:
                return str(error)
            return ""

        if self._wanted(LOSS_HEAD, no_loss_head):
            yield LOSS_HEAD
        if self._wanted(OFFLOAD_LAYERS, no_layers):
            yield OFFLOAD_LAYERS

    @cached_property
    def micro_batches(self) -> list[str]:
        """Names of micro-batches in question: 2, 4, 8 …, up to the first number that is enough alone."""
        samples = self.step.samples or 1
        why = "exact=True" if self.exact else self.step.no_micro_batches
        if not why and self.step.draws and MICRO_BATCHES not in self.allowed:
            why = 'the model draws random numbers, of which micro-batches draw others: allow={"dropout"}'
        if why:
            self.refused[MICRO_BATCHES] = why
            return []
        found, count = [], 1
        while count < samples:
            count = min(2 * count, samples)
            found.append(f"{MICRO_BATCHES}:{count}")
            if self.attempt(Names(found[-1:])).fits:
                break
        return found

    # ---- measurement -------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_with(self, head: bool, drops: bool) -> Iterator[None]:
        """Have the model as it is with a fused loss head, or with gradients that go as they are made."""
        handle = fuse_loss_head(self.step.model) if head else None
        hooks: list[Any] = []
        try:
            with left_as_it_is(self.step.model):
                try:
                    if drops:
                        stepped = {id(p): p for g in self.step.optimizer.param_groups for p in g["params"]}
                        for p in stepped.values():
                            if p.requires_grad:
                                hooks.append(p.register_post_accumulate_grad_hook(_drop))  # type: ignore[attr-defined]
                    yield
                finally:
                    for hook in hooks:
                        hook.remove()
        finally:
            if handle is not None:
                handle.remove()

    def measured(self, count: int, head: bool, drops: bool) -> Measured:
        """Return the chain's costs for one of so many micro-batches."""
        key = count, head, drops
        if key not in self._measured:
            known: list[StageSeconds] | None = None
            if drops:  # which changes no stage's work
                known = self.measured(count, head, False).costs.stage_seconds
            call = self.step.call(None if count == 1 else self.micro_batch_size(count))
            with self._as_with(head, drops):
                try:
                    chain = ModelChain(self.step.model, call.args, call.kwargs)
                except ValueError as error:
                    self.refused[CHECKPOINT] = str(error)
                    chain = ModelChain(Whole(self.step.model), call.args, call.kwargs)
                costs = ChainMeasurement(chain, call.loss, keeps_output=False, seconds=known)
            if CHECKPOINT in self.refused and CHECKPOINT in self.levers:
                self.levers.remove(CHECKPOINT)
            self._measured[key] = Measured(chain, costs)
        return self._measured[key]

    def micro_batch_size(self, count: int) -> int:
        assert self.step.samples is not None
        return -(-self.step.samples // count)

    def _measured_with(self, names: Names) -> Measured:
        return self.measured(micro_batches_of(names), LOSS_HEAD in names, self._drops(names))

    @cached_property
    def link(self) -> Bandwidth:
        return bandwidth("cpu", self.step.device)

    @cached_property
    def host_rate(self) -> float:
        """Bytes a second that the host reads or writes, by a copy of 64 MiB."""
        there = torch.zeros(16 << 20)
        begun = time.perf_counter()
        there.clone()
        nbytes: int = 2 * there.nbytes
        return nbytes / (time.perf_counter() - begun)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def beside(self, names: Names) -> OnDevice:
        """Return what the optimizer takes on the device."""
        chosen = Names(names & {FUSED, *OPTIONS})
        if chosen not in self._beside:
            optimizer, device = self.step.optimizer, self.step.device
            if chosen:
                self._beside[chosen] = optimizers.bytes_with(optimizer, chosen, device)
            else:
                with left_as_it_is(self.step.model):
                    found = foretold(optimizer)
                states = found.there_bytes + sum(block_bytes(size, device) for size in found.coming)
                self._beside[chosen] = OnDevice(found, states, 0)
        return self._beside[chosen]

    def _kept_apart(self, names: Names) -> int:
        """Return bytes that memopt.backward keeps apart: copies of buffers, random states, earlier gradients."""
        if micro_batches_of(names) == 1:
            return 0
        measured = self._measured_with(names).costs
        gradients = sum(size.parameter_grad for size in measured.stage_bytes) if self.accumulates else 0
        if self.step.device.type == "cpu":
            gradients += RANDOM_STATES * torch.get_rng_state().nbytes
        return 2 * min(bytes_of(self.step.model.buffers()), KEPT_BUFFERS) + gradients

    def _besides(self, names: Names) -> int:
        """Return bytes that levers take besides: copies on their way, and what memopt.backward keeps apart."""
        besides = self.beside(names).besides + self._kept_apart(names)
        if OFFLOAD_LAYERS in names:
            layers = find_layers(self.step.model)
            sizes = [layer_bytes(layer.parameters()) for layer in layers]
            largest = max(sizes)
            besides += 2 * largest + beside(_typical(sizes)) - bytes_of(self.step.model.parameters())
        return besides

    def _copies(self, names: Names) -> float:
        """Return the seconds of copies between device and host in a step, as if none was hidden."""
        chosen = names & {OFFLOAD_GRADIENTS, OFFLOAD_STATES, OFFLOAD_LAYERS}
        if not chosen:
            return 0.0
        there, back = 1 / self.link.out, 1 / self.link.back
        parameters = bytes_of(self.step.model.parameters())
        gradients = bytes_of(
            p for g in self.step.optimizer.param_groups for p in g["params"] if p.requires_grad
        )
        states = self.beside(names).states
        count = micro_batches_of(names) * self.step.batches
        seconds = 0.0
        if OFFLOAD_GRADIENTS in names:
            seconds += count * gradients * (there + back)
        if OFFLOAD_STATES in names:
            seconds += states * (there + back)
        if OFFLOAD_LAYERS in names:
            seconds += count * (2 * parameters * back + gradients * there)
            seconds += (3 * gradients + 2 * states) / self.host_rate  # the step, on the host
        return seconds

    def _plain(self, names: Names) -> ChainCosts:
        measured = self._measured_with(names).costs
        return chain_costs(measured, beside=0, accumulate=self._accumulates(names))

    def _accumulates(self, names: Names) -> bool:
        return not self._drops(names) and (self.accumulates or micro_batches_of(names) > 1)

    def least_seconds(self, names: Names) -> float:
        """Return a bound: these levers take no less, whatever is recomputed."""
        one = self.measured(micro_batches_of(names), LOSS_HEAD in names, False).costs
        seconds = sum(stage.full_forward + stage.backward for stage in one.stage_seconds)
        return seconds * micro_batches_of(names) * self.step.batches + self._copies(names)

    def attempt(self, names: Names) -> Attempt:
        """Price a combination."""
        room = self.budget - self._set_aside.get(names, 0)
        known = self.attempts.get(names)
        if known is not None:
            return known
        measured = self._measured_with(names).costs
        costs = self._plain(names)
        optimizer, device = self._optimizer(names), self.step.device
        states = optimizer.there_bytes + sum(block_bytes(size, device) for size in optimizer.coming)
        fixed = states + self._besides(names)
        in_step = measured.standing_bytes + measured.workspace_bytes + fixed + measured.result_bytes
        in_step += sum(size.parameter_grad for size in measured.stage_bytes)
        in_step += sum(block_bytes(size, device) for size in optimizer.passing)
        plain = keep_all(costs.chain)
        in_passes = costs.fixed + fixed + costs.around.peak(plain)
        seconds, candidate = plain.seconds, None
        if CHECKPOINT in names:
            try:
                candidate = self._candidate(names, fixed, room)
            except InfeasibleBudget:
                candidate = self._candidate(names, fixed, None)
            in_passes, seconds = candidate[0].predicted_bytes, candidate[0].schedule.seconds
        if in_step <= room < in_passes <= NEAR * self.budget:
            in_passes -= self._counted_twice(names, candidate, in_passes)
        least = max(in_passes, in_step)
        count = micro_batches_of(names) * self.step.batches
        found = Attempt(
            names,
            least <= room,
            in_passes,
            in_step,
            seconds * count + self._copies(names),
            least + self._set_aside.get(names, 0),
            states,
            candidate,
        )
        self.attempts[names] = found
        return found

    def _candidate(self, names: Names, fixed: int, room: int | None) -> Candidate:
        """Return the fastest schedule within the room, or the one that takes least. Raises InfeasibleBudget."""
        return plan_for(
            self._measured_with(names).costs,
            room,
            SLOTS,
            beside=fixed,
            accumulate=self._accumulates(names),
            whose=type(self.step.model).__name__,
            speed=None if self.to is None else self.link,
        )

    def _counted_twice(self, names: Names, candidate: Candidate | None, foreseen: int) -> int:
        """Return bytes by which passes take less than was worked out; 0 where none could be run.

        A chain counts what skips its stages for longer than it lives. They are the same whatever the optimizer is.
        """
        key = (micro_batches_of(names), LOSS_HEAD in names, self._drops(names), candidate is not None)
        if OFFLOAD_LAYERS in names:
            return 0
        if key not in self._less:
            try:
                taken = self._trial(names, candidate).in_passes
            except torch.OutOfMemoryError:
                taken = 0
            self._less[key] = max(0, foreseen - taken) if taken else 0
        return self._less[key]

    def _drops(self, names: Names) -> bool:
        """Return whether gradients leave the device as they are made."""
        return bool(names & {OFFLOAD_GRADIENTS, STEP_IN_BACKWARD, OFFLOAD_LAYERS})

    @property
    def to(self) -> str | None:
        """Where stages may keep what they save."""
        return "cpu" if self.step.device.type == "cuda" else None

    def _optimizer(self, names: Names) -> OptimizerBytes:
        """Return what the optimizer takes; nothing where its parameters are on the host."""
        return OptimizerBytes([], [], [], 0) if OFFLOAD_LAYERS in names else self.beside(names).taken

    # ---- the search --------------------------------------------------------------------------------------------------

    def tier(self, names: Names) -> int:
        tier = tier_of(names)
        if micro_batches_of(names) > 1 and self.step.draws:
            return OTHER
        return tier

    def candidates(self, tier: int) -> Iterator[Names]:
        """Yield the combinations of a tier."""
        if tier == FREE:
            yield Names()
            return
        named = [name for name in self.levers if tier_of([name]) <= tier]
        several = self.micro_batches if tier > BIT_EQUAL else []
        seen: set[Names] = set()
        for micro in [None, *several]:
            for names in combinations([*named, *([micro] if micro else [])]):
                if names not in seen and self.tier(names) == tier and _goes_together(names):
                    seen.add(names)
                    yield names

    def fastest(self, tier: int) -> Attempt | None:
        """Return the fastest combination of a tier that fits, the smallest one of those that are about as fast."""
        self.measured(1, False, False)  # which tells whether there is a chain
        fitting: list[Attempt] = []
        bounds = {names: self.least_seconds(names) for names in self.candidates(tier)}
        best = float("inf")
        for names in sorted(bounds, key=lambda names: (bounds[names], len(names), sorted(names))):
            if bounds[names] > ALIKE * best:
                break
            tried = self.attempt(names)
            if tried.fits:
                fitting.append(tried)
                best = min(best, tried.seconds)
        alike = [one for one in fitting if one.seconds <= ALIKE * best]
        return min(alike, key=lambda one: (len(one.names), one.seconds, sorted(one.names)), default=None)

    def plan(self) -> Fit:
        """Return the plan: the fastest of the lowest tier, whose step was tested where that is possible."""
        chosen: Attempt | None = None
        for tier in range(len(TIERS)):
            for _ in range(TRIALS):
                chosen = self.fastest(tier)
                if chosen is None or self._stands(chosen):
                    break
                chosen = None
            if chosen is not None:
                break
        return self._result(chosen)

    def _stands(self, found: Attempt) -> bool:
        """Test a plan by steps. If they take more than the budget, set that much aside in what is worked out."""
        if OFFLOAD_LAYERS in found.names:
            return True  # its parameters would have to leave
        try:
            taken = self._tested(found)
        except torch.OutOfMemoryError:
            taken = self.budget + self.budget // 16
        found.tested = taken
        if taken <= self.budget:
            return True
        logger.debug("memopt.fit: %s took %d, and %d was worked out", sorted(found.names), taken, found.peak)
        del self.attempts[found.names]
        self._set_aside[found.names] = self._set_aside.get(found.names, 0) + taken - self.budget
        return False

    def _tested(self, found: Attempt) -> int:
        """Return the most bytes of steps by a plan, 0 where the allocator cannot be asked."""
        taken = self._trial(found.names, found.candidate)
        return max(taken.in_passes, taken.in_step)

    def _trial(self, names: Names, candidate: Candidate | None) -> TrialSteps:
        measured = self._measured_with(names)
        optimizer = self._optimizer(names)
        optimizer = optimizer._replace(unseen=optimizer.unseen + self._besides(names))
        with self._as_with(LOSS_HEAD in names, self._drops(names)):
            if candidate is not None:
                forward = planned_forward(candidate, measured.costs, measured.chain, self.to)
            else:
                forward = _plain_forward(measured)
            return bytes_of_step(measured.costs, forward, optimizer, accumulate=self._accumulates(names))

    # ---- the result --------------------------------------------------------------------------------------------------

    def _result(self, chosen: Attempt | None) -> Fit:
        plain = self.attempt(Names())
        singles = [self.attempts[names] for names in list(self.attempts) if len(names) == 1]
        shown = [chosen] if chosen is not None else []
        shown += [one for one in (plain, *singles) if one is not chosen]
        others = [one for one in self.attempts.values() if one.fits and all(one is not row for row in shown)]
        shown += sorted(others, key=lambda one: (self.tier(one.names), one.seconds))[: _ROWS - len(shown)]
        least = None if chosen is not None else min(self.attempts.values(), key=lambda one: one.least)
        return Fit(
            step=self.step,
            memory_budget=self.budget,
            names=None if chosen is None else chosen.names,
            rows=[self._row(one) for one in shown],
            refused=dict(self.refused),
            least_budget=0 if least is None else least.least + least.least // SPARE,
            recomputed=self._recomputed(chosen),
            chain_budget=self._chain_budget(chosen),
            to=self.to,
            micro_batch_size=None
            if chosen is None or micro_batches_of(chosen.names) == 1
            else self.micro_batch_size(micro_batches_of(chosen.names)),
        )

    def _row(self, one: Attempt) -> Row:
        parameters = bytes_of(self.step.model.parameters())
        if OFFLOAD_LAYERS in one.names:
            parameters = 0
        return Row(
            levers=tuple(sorted(one.names)),
            tier=TIERS[self.tier(one.names)],
            fits=one.fits,
            predicted_bytes=one.peak,
            tested_bytes=one.tested,
            seconds=one.seconds,
            saved_bytes=self.attempts[Names()].peak - one.peak,
            parts={"parameters": parameters, "optimizer": one.states},
        )

    def _recomputed(self, chosen: Attempt | None) -> tuple[int, int]:
        """Return how many stages a plan runs again or offloads, and of how many."""
        if chosen is None or chosen.candidate is None:
            return 0, 0
        plan = chosen.candidate[0]
        runs = [op for op in plan.schedule.ops if op[0] in ("fall", "fck", "fnone")]
        stages = len(plan.chain.stages)
        changed = {k for k in range(stages) if sum(op[1] == k for op in runs) > 1} | {*plan.offloaded}
        return len(changed), stages - 1

    def _chain_budget(self, chosen: Attempt | None) -> int:
        """Return the budget that auto_checkpoint() is given: it does not see what some levers take besides."""
        if chosen is None:
            return 0
        unseen = self._kept_apart(chosen.names)
        if STEP_IN_BACKWARD in chosen.names:
            unseen += self.beside(chosen.names).besides
        return self.budget - unseen


_ROWS = 8


def micro_batches_of(names: Iterable[str]) -> int:
    """Return the number of micro-batches in a combination."""
    return next((int(name.partition(":")[2]) for name in names if name.startswith(MICRO_BATCHES)), 1)


def _goes_together(names: Names) -> bool:
    """Return whether levers add to each other: an optimizer that steps on the host takes nothing of the device."""
    return OFFLOAD_LAYERS not in names or not names & {FUSED, *OPTIONS}


def _plain_forward(measured: Measured) -> Callable[[], tuple[Any, Tensor]]:
    def forward() -> tuple[Any, Tensor]:
        with torch.enable_grad():
            chain = measured.chain
            return None, measured.costs.loss(chain.model(*chain.args, **chain.kwargs))

    return forward


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
