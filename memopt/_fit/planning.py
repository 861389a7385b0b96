"""memopt.fit(): levers under one budget, on the live model.

Every combination of the lowest tier that fits is priced (pricing.py), but for those that cannot be faster than what has
been found. The chosen one is tested by a step; where it takes more than was worked out, the search goes on with less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from memopt import _C
from memopt._checkpoint.checked_plan import SPARE
from memopt._checkpoint.stages.costs import bytes_of
from memopt._estimate.fit import ALLOWED
from memopt._estimate.search import ALIKE, BIT_EQUAL, FREE, OTHER, TIERS, Names, combinations, tier_of
from memopt._fit import optimizers
from memopt._fit.pricing import SCHEDULES, Attempt, Prices, micro_batches_of
from memopt._fit.result import Fit, Row
from memopt._fit.training_step import TrainingStep
from memopt._microbatch.split_batch import Reduction
from memopt._offload.model_layers import check_model
from memopt._run.plan import (
    BF16,
    CHECKPOINT,
    CODED_ACTIVATIONS,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    FUSED,
    LOSS_HEAD,
    MICRO_BATCHES,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
    STATES_ON_DISK,
    STEP_IN_BACKWARD,
    TILES,
    of_optimizers,
    options_of,
    plain,
)
from memopt._runtime import arguments
from memopt.nn._fuse_loss_head import fuse_loss_head
from memopt.optim._one_pass import OnePass

TRIALS = 8  # of plans by a step
ALLOW = ALLOWED | {"dropout": MICRO_BATCHES}


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
    host_memory: int | str | None = None,
    disk: str | os.PathLike[str] | None = None,
) -> Fit:
    """Find the levers with which a training step of this model stays within a budget, on the machine at hand.

    In question are: a schedule by which stages are kept, recomputed or offloaded (memopt.auto_checkpoint), with what
    the other levers leave of the budget; memopt's optimizer in one pass, with its gradients or states on the host, its
    states on a disk where `disk` names a directory, or with its steps in the backward pass; the loss head in chunks
    (memopt.nn.fuse_loss_head); MLPs some rows at a time (memopt.nn.tile_mlps); layers on the host
    (memopt.offload_layers); and micro-batches with the gradients of the whole batch (memopt.backward). Of the plans
    that fit those come first that change nothing, then those with bit-equal results, then those equal to rounding; of
    one tier the fastest, without a lever that it does not need. The learning rate and the effective batch are never
    changed, and the dtype only where `allow` has "bf16". What offloads to the host needs a CUDA device.

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
        allow: What may change results beyond rounding: "8bit" and "4bit" (optimizer states), "factored" (second
            moments, as averages of rows and columns), "bf16" (autocast of the model and the loss), "dropout"
            (micro-batches of a model that draws random numbers, which then draw others), "8bit-activations" (a schedule
            by which stages are kept, recomputed or kept in 8 bits: memopt.auto_checkpoint(to="8bit")).
        reads_gradients: Whether the training reads gradients between backward and step: clips, scales or logs them.
            They then stay where they are.
        host_memory: Most bytes of the host's memory that a plan takes, for what it puts there: states, gradients, what
            stages save, layers. An int or "64GiB"; None for no limit.
        disk: A directory on a disk, for optimizer states that the host's memory has no room for. Its rate is measured.

    Returns:
        A Fit: print it. `.fits` is whether there is a plan, `.code()` the lines to write; `.apply()` carries it out.

    Raises:
        ValueError: memory_budget or host_memory cannot be read, or no file can be made in `disk`; no plan can be within
            memory_budget, as the parameters alone take more; the optimizer has other parameters than the model; the
            sample does not run; there is no loss; a word of `allow` is unknown; the model is planned, offloaded,
            compiled, on several devices, or in several processes.
        TypeError: An argument has the wrong type, such as a list of optimizers.

    Examples:
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
    if exact and allow:
        raise ValueError(f"memopt.fit: exact=True rules out allow={sorted(allow)}: leave one of the two out")
    step = TrainingStep(model, optimizer, sample, loss, reduction, effective_batch)
    try:
        budget = arguments.budget(memory_budget, step.device)
        on_host = None if host_memory is None else arguments.size(host_memory, "host_memory")
        directory = None if disk is None else arguments.directory(disk, "disk")
    except ValueError as error:
        raise ValueError(f"memopt.fit: {error}") from None
    planner = Planner(
        step, budget, exact, {ALLOW[word] for word in allow}, reads_gradients, on_host, directory
    )
    parameters = bytes_of(model.parameters())
    if budget < parameters and OFFLOAD_LAYERS not in planner.levers:
        raise ValueError(
            f"memopt.fit: memory_budget is {_C.format_size(budget)}, and the parameters alone take "
            f"{_C.format_size(parameters)} on {step.device}: raise memory_budget, or make the model smaller"
        )
    return planner.plan()


class Planner:
    """The search for a plan.

    Attributes:
        levers: Those that are in question.
        refused: Others, and why not.
    """

    def __init__(
        self,
        step: TrainingStep,
        budget: int,
        exact: bool,
        allowed: Collection[str],
        reads_gradients: bool,
        host_memory: int | None = None,
        disk: str | None = None,
    ) -> None:
        self.step, self.budget, self.exact, self.allowed = step, budget, exact, allowed
        self.reads_gradients, self.disk = reads_gradients, disk
        self.refused: dict[str, str] = {}
        self.levers = [CHECKPOINT, *self._optimizer_levers(), *self._model_levers()]
        self.prices = Prices(step, budget, host_memory)

    # ---- what is in question -----------------------------------------------------------------------------------------

    def _wanted(self, name: str, reason: Callable[[], str]) -> bool:
        """Return whether a lever is in question; if not, note why."""
        if self.exact and tier_of([name]) > BIT_EQUAL:
            self.refused[plain(name)] = "exact=True"
        elif tier_of([name]) == OTHER and name not in self.allowed:
            word = next(word for word, allowed in ALLOW.items() if allowed == name)
            self.refused[name] = f"changes results: allow={{{word!r}}}"
        elif why := reason():
            self.refused[plain(name)] = why
        else:
            return True
        return False

    def _optimizer_levers(self) -> Iterator[str]:
        optimizer = self.step.optimizer
        for name in (
            FUSED,
            OFFLOAD_STATES,
            *([] if self.disk is None else [f"{STATES_ON_DISK}:{self.disk}"]),
            OFFLOAD_GRADIENTS,
            STEP_IN_BACKWARD,
            EIGHT_BITS,
            FOUR_BITS,
            FACTORED,
        ):

            def reason(name: str = name) -> str:
                if name in (OFFLOAD_STATES, OFFLOAD_GRADIENTS) and self.step.device.type != "cuda":
                    return "the model is in the host's memory already"
                if name in (OFFLOAD_GRADIENTS, STEP_IN_BACKWARD) and self.reads_gradients:
                    return "reads_gradients=True"
                if name == STEP_IN_BACKWARD and self.step.batches > 1:
                    return "gradients of several batches are added up"
                try:
                    kind = optimizers.counterpart_of(optimizer)
                    if name == FUSED and isinstance(optimizer, OnePass):
                        return "it is already"
                    optimizers.trial_copy(optimizer, options_of([name]))
                except (ValueError, TypeError) as error:
                    return str(error)
                options = options_of([name]).items()
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

        def no_tiles() -> str:
            try:
                _ = self.step.tiles
            except ValueError as error:
                return str(error).removeprefix("tile_mlps: ")
            return ""

        def no_bf16() -> str:
            kind = self.step.device.type
            if torch.is_autocast_enabled(kind):
                return "autocast is on already"
            if kind == "cuda" and not torch.cuda.is_bf16_supported():
                return "this device does not compute in bf16"
            if all(p.dtype != torch.float32 for p in self.step.model.parameters()):
                return "no parameter is in fp32"
            return ""

        def no_layers() -> str:
            if self.step.device.type != "cuda":
                return "the model is in the host's memory already"
            try:
                check_model(self.step.model)
            except (TypeError, ValueError) as error:
                return str(error)
            return ""

        if self._wanted(CODED_ACTIVATIONS, lambda: ""):
            yield CODED_ACTIVATIONS
        if self._wanted(LOSS_HEAD, no_loss_head):
            yield LOSS_HEAD
        if self._wanted(TILES, no_tiles):
            yield TILES
        if self._wanted(BF16, no_bf16):
            yield BF16
        if self._wanted(OFFLOAD_LAYERS, no_layers):
            yield OFFLOAD_LAYERS

    @cached_property
    def micro_batches(self) -> list[str]:
        """Names of micro-batches in question: 2, 4, 8 … up to the first number that is enough alone, and the fewer ones
        that are asked whether they are, too."""
        samples = self.step.samples or 1
        why = "exact=True" if self.exact else self.step.no_micro_batches
        if not why and self.step.draws and MICRO_BATCHES not in self.allowed:
            why = 'the model draws random numbers, of which micro-batches draw others: allow={"dropout"}'
        if why:
            self.refused[MICRO_BATCHES] = why
            return []
        counts = [1]
        while counts[-1] < samples:
            counts.append(self.prices.count_of(self.prices.micro_batch_size(min(2 * counts[-1], samples))))
            if self.prices.attempt(Names([_several(counts[-1])])).fits:
                counts += self._between(counts[-2], counts[-1], Names())
                break
        return [_several(count) for count in sorted(counts[1:])]

    def _between(self, fewer: int, more: int, others: Names) -> list[int]:
        """Return the numbers of micro-batches asked on the way from one that does not fit, beside these levers, to the
        fewest that do: by bisection of the sizes of micro-batches."""
        large, small = map(self.prices.micro_batch_size, (fewer, more))
        asked: list[int] = []
        while large - small > 1:
            size = (large + small) // 2
            count = self.prices.count_of(size)
            if count not in (fewer, more, *asked):
                asked.append(count)
            fits = count != fewer and (count == more or self.prices.attempt(others | {_several(count)}).fits)
            small, large = (size, large) if fits else (small, size)
        return asked

    def refined(self, chosen: Attempt) -> Attempt:
        """Return the fastest plan of the same levers by numbers of micro-batches near the one that was chosen."""
        count = micro_batches_of(chosen.names)
        if count == 1:
            return chosen
        others = Names(name for name in chosen.names if not name.startswith(MICRO_BATCHES))
        known = sorted({1, *(micro_batches_of([name]) for name in self.micro_batches)})
        place = known.index(count)
        near = self._between(known[place - 1], count, others)
        if others & SCHEDULES and place + 1 < len(known):  # by fewer recomputations
            sizes = [self.prices.micro_batch_size(known[k]) for k in (place, place + 1)]
            near.append(self.prices.count_of(sum(sizes) // 2))
        tried = [self.prices.attempt(others | {_several(other)}) for other in near]
        return min([chosen, *(one for one in tried if one.fits)], key=lambda one: one.seconds)

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

    def _leave_out_what_has_no_chain(self) -> None:
        for name in SCHEDULES.intersection(self.levers):
            if why := self.prices.no_chain():
                self.levers.remove(name)
                self.refused[name] = why

    def fastest(self, tier: int) -> Attempt | None:
        """Return the fastest combination of a tier that fits, the smallest one of those that are about as fast."""
        self._leave_out_what_has_no_chain()
        fitting: list[Attempt] = []
        bounds = {names: self.prices.least_seconds(names) for names in self.candidates(tier)}
        best = float("inf")
        for names in sorted(bounds, key=lambda names: (bounds[names], len(names), sorted(names))):
            if bounds[names] > ALIKE * best:
                break
            whole = self.prices.attempts.get(names - {TILES})
            if TILES in names and whole is not None and whole.fits and whole.seconds <= ALIKE * bounds[names]:
                continue
            tried = self.prices.attempt(names)
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
                chosen = None if chosen is None else self.refined(chosen)
                if chosen is None or self.prices.stands(chosen):
                    break
                chosen = None
            if chosen is not None:
                chosen = self.prices.with_more_room(chosen)
                break
        return self._result(chosen)

    # ---- the result --------------------------------------------------------------------------------------------------

    def _result(self, chosen: Attempt | None) -> Fit:
        plain = self.prices.attempt(Names())
        singles = [self.prices.attempts[names] for names in list(self.prices.attempts) if len(names) == 1]
        shown = [chosen] if chosen is not None else []
        shown += [one for one in (plain, *singles) if one is not chosen]
        others = [
            one for one in self.prices.attempts.values() if one.fits and all(one is not row for row in shown)
        ]
        shown += sorted(others, key=lambda one: (self.tier(one.names), one.seconds))[: _ROWS - len(shown)]
        least = None
        if chosen is None:
            possible = [one for one in self.prices.attempts.values() if not one.too_much]
            least = min(possible, key=lambda one: one.least)
        return Fit(
            step=self.step,
            memory_budget=self.budget,
            names=None if chosen is None else chosen.names,
            rows=[self._row(one) for one in shown],
            refused=dict(self.refused),
            least_budget=0 if least is None else least.least + least.least // SPARE,
            recomputed=self._recomputed(chosen),
            chain_budget=self._chain_budget(chosen),
            to=self.prices.to(Names() if chosen is None else chosen.names),
            chain_host_memory=None if chosen is None else self.prices.host_left(chosen.names),
            micro_batch_size=None
            if chosen is None or micro_batches_of(chosen.names) == 1
            else self.prices.micro_batch_size(micro_batches_of(chosen.names)),
            planned=None if chosen is None else self.prices.planned(chosen),
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
            tested_seconds=one.tested_seconds,
            saved_bytes=self.prices.attempts[Names()].peak - one.peak,
            host_bytes=one.host,
            fails=one.too_much,
            parts={"parameters": parameters, "optimizer": one.states},
        )

    def _recomputed(self, chosen: Attempt | None) -> tuple[int, int]:
        """Return how many stages a plan runs again or offloads, and of how many."""
        if chosen is None or chosen.candidate is None:
            return 0, 0
        plan = chosen.candidate[0]
        runs = [op for op in plan.schedule.ops if op[0] in ("fall", "fck", "fnone")]
        stages = len(plan.chain.stages)
        changed = {k for k in range(stages) if sum(op[1] == k for op in runs) > 1}
        return len(changed | plan.offloaded | plan.inputs_offloaded), stages - 1

    def _chain_budget(self, chosen: Attempt | None) -> int:
        """Return the budget that auto_checkpoint() is given: it does not see what some levers take besides."""
        if chosen is None:
            return 0
        unseen = self.prices.kept_apart(chosen.names)
        if STEP_IN_BACKWARD in chosen.names:
            unseen += self.prices.beside(chosen.names).besides
        return self.budget - unseen


_ROWS = 8


def _several(count: int) -> str:
    return f"{MICRO_BATCHES}:{count}"


def _goes_together(names: Names) -> bool:
    """Return whether levers add to each other: an optimizer that steps on the host takes nothing of the device."""
    return OFFLOAD_LAYERS not in names or not (FUSED in names or of_optimizers(names))
