"""The price of a combination of levers: bytes and seconds of a training step, worked out.

The step's chain is measured for each size of micro-batch that is in question; what a combination takes is then
arithmetic: of its phases (the forward pass and each stage's backward pass, and the optimizer's step) the one that takes
most. Trial steps test it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt._checkpoint.checked_plan import (
    Candidate,
    ChainCosts,
    TrialSteps,
    bytes_of_step,
    chain_costs,
    faster_within,
    note_trial,
    plan_for,
    ran_out,
)
from memopt._checkpoint.plan import SLOTS, keep_all
from memopt._checkpoint.shape_plans import (
    CallShape,
    ShapePlan,
    left_as_it_is,
    planned_forward,
    stage_forwards,
)
from memopt._checkpoint.stages.costs import StageSeconds, block_bytes, bytes_of
from memopt._checkpoint.stages.measure import ChainMeasurement
from memopt._checkpoint.stages.model_chain import ModelChain
from memopt._estimate.fit import too_much_of_host
from memopt._estimate.search import Names
from memopt._fit import optimizers
from memopt._fit.optimizers import OnDevice
from memopt._fit.training_step import TrainingStep
from memopt._microbatch.attempt import KEPT_BUFFERS
from memopt._offload.carriers import beside
from memopt._offload.layers import typical_layer
from memopt._offload.model_layers import find_layers
from memopt._offload.model_layers import nbytes as layer_bytes
from memopt._offload.pinned_memory import aligned, pinned_bytes
from memopt._offload.schedule_sets import Bandwidth, bandwidth
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
    SAVED_ELSEWHERE,
    STATES_ON_DISK,
    STEP_IN_BACKWARD,
    TILES,
    of_optimizers,
    plain,
)
from memopt._runtime.log import logger
from memopt.chain import InfeasibleBudget
from memopt.nn._fuse_loss_head import fuse_loss_head
from memopt.nn._tile_mlps import put
from memopt.optim._state_bytes import OptimizerBytes, foretold

NEAR = 1.5  # times the budget: what is worked out to take more is not tried
OTHER_FORWARD = Names({LOSS_HEAD, TILES, BF16})  # levers with which the model runs other functions
SCHEDULES = Names({CHECKPOINT, CODED_ACTIVATIONS})  # by which stages run, of which each has a place
RANDOM_STATES = 4  # that memopt.backward has: of the batch, of a micro-batch, and two that are compared


@dataclass
class Attempt:
    """A combination of levers, with its price.

    in_passes, in_step: bytes at the peak of the forward and backward passes, and while the optimizer steps; least: of a
    budget that would do. host: bytes of the host's memory; too_much: why these are too many. tested, tested_seconds:
    the most that a step took, and seconds by it; 0 if none was taken.
    """

    names: Names
    fits: bool
    in_passes: int
    in_step: int
    seconds: float
    least: int
    states: int
    candidate: Candidate | None = None
    host: int = 0
    too_much: str = ""
    tested: int = 0
    tested_seconds: float = 0.0

    @property
    def peak(self) -> int:
        return max(self.in_passes, self.in_step)


class Measured(NamedTuple):
    """A model's chain, its costs, and the call that it was measured in."""

    chain: ModelChain
    costs: ChainMeasurement
    shape: CallShape
    seconds: float  # of measuring


class Whole(nn.Module):
    """A model as the only stage of a chain: for one that is none itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Prices:
    """The prices of combinations for one step under a budget. host_memory: bytes for what they put on the host.

    Attributes:
        attempts: Those that were asked for.
    """

    def __init__(self, step: TrainingStep, budget: int, host_memory: int | None = None) -> None:
        self.step, self.budget, self.host_memory = step, budget, host_memory
        self.accumulates = step.batches > 1
        self.attempts: dict[Names, Attempt] = {}
        self._rooms: dict[Names, int] = {}  # of a combination that did not stand: bytes for its next attempt
        self._beyond: dict[Names, int] = {}  # bytes that its steps took beyond what was worked out
        self._no_chain = ""
        self._measured: dict[tuple[int, Names, Names], Measured] = {}
        self._beside: dict[Names, OnDevice] = {}
        self._step_seconds: dict[Names, float] = {}
        self._less: dict[tuple[int, Names, Names, Names], int] = {}

    # ---- measurement -------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_with(self, count: int, forward: Names, go: Names) -> Iterator[None]:
        """Have the model as it is with levers of OTHER_FORWARD, and with gradients that go as they are made."""
        sums = count > 1 or self.accumulates
        hooks = optimizers.trial_gradients(self.step.optimizer, go, sums) if go else nullcontext()
        with ExitStack() as undo:
            if LOSS_HEAD in forward:
                undo.callback(fuse_loss_head(self.step.model).remove)
            if TILES in forward:
                put(self.step.tiles.forwards.values())
                undo.callback(self.step.tiles.remove)
            undo.enter_context(self.step.cast(forward))
            with left_as_it_is(self.step.model), hooks:
                yield

    def measured(self, count: int, forward: Names, go: Names) -> Measured:
        """Return the chain's costs for one of so many micro-batches, with levers of OTHER_FORWARD. go: levers by which
        gradients go."""
        key = count, forward, go
        if key not in self._measured:
            known: list[StageSeconds] | None = None
            if go:  # which changes no stage's work
                known = self.measured(count, forward, Names()).costs.stage_seconds
            call = self.step.call(None if count == 1 else self.micro_batch_size(count))
            begun = time.perf_counter()
            with self._as_with(count, forward, go):
                try:
                    chain = ModelChain(self.step.model, call.args, call.kwargs)
                except ValueError as error:
                    self._no_chain = str(error)
                    chain = ModelChain(Whole(self.step.model), call.args, call.kwargs)
                costs = ChainMeasurement(chain, call.loss, keeps_output=False, seconds=known)
                shape = CallShape.of(self.step.model, call.args, call.kwargs)
            self._measured[key] = Measured(chain, costs, shape, time.perf_counter() - begun)
        return self._measured[key]

    def no_chain(self) -> str:
        """Return why the model is no chain of stages; "" if it is."""
        self.measured(1, Names(), Names())
        return self._no_chain

    def micro_batch_size(self, count: int) -> int:
        assert self.step.samples is not None
        return -(-self.step.samples // count)

    def count_of(self, size: int) -> int:
        """Return the number of micro-batches of at most so many samples."""
        assert self.step.samples is not None
        return -(-self.step.samples // size)

    def _measured_with(self, names: Names) -> Measured:
        return self.measured(micro_batches_of(names), names & OTHER_FORWARD, _going(names))

    @cached_property
    def link(self) -> Bandwidth:
        return bandwidth("cpu", self.step.device)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def beside(self, names: Names) -> OnDevice:
        """Return what the optimizer takes on the device."""
        chosen = of_optimizers(names) | names & {FUSED}
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

    def kept_apart(self, names: Names) -> int:
        """Return bytes that memopt.backward keeps apart: copies of buffers, random states, earlier gradients."""
        if micro_batches_of(names) == 1:
            return 0
        measured = self._measured_with(names).costs
        gradients = sum(size.parameter_grad for size in measured.stage_bytes) if self.accumulates else 0
        if self.step.device.type == "cpu":
            gradients += RANDOM_STATES * torch.get_rng_state().nbytes
        return 2 * min(bytes_of(self.step.model.buffers()), KEPT_BUFFERS) + gradients

    def _besides(self, names: Names) -> int:
        """Return bytes that levers take besides, throughout: what memopt.backward keeps apart, layers on their way."""
        besides = self.kept_apart(names)
        if OFFLOAD_LAYERS in names:
            layers = find_layers(self.step.model)
            sizes = [layer_bytes(layer.parameters()) for layer in layers]
            largest = max(sizes)
            besides += 2 * largest + beside(typical_layer(sizes)) - bytes_of(self.step.model.parameters())
        return besides

    def _fixed(self, names: Names) -> int:
        """Return bytes beside the chain's that live throughout: the optimizer's states, and what levers take."""
        optimizer, device = self._optimizer(names), self.step.device
        states = optimizer.there_bytes + sum(block_bytes(size, device) for size in optimizer.coming)
        return states + self._besides(names)

    def _on_host(self, names: Names, candidate: Candidate | None) -> int:
        """Return the bytes of the host's memory that levers take: pinned, and made of what is stepped there."""
        if self.step.device.type != "cuda":
            return 0
        taken = self.beside(names).on_host
        if candidate is not None:
            taken += sum(candidate[0].offload_slots.values())
        gradients = [
            p.nbytes for g in self.step.optimizer.param_groups for p in g["params"] if p.requires_grad
        ]
        # What is on its way is beside what it is added to:
        adds = micro_batches_of(names) * self.step.batches > 1
        if OFFLOAD_GRADIENTS in names:
            taken += pinned_bytes([*gradients, *([max(gradients, default=0)] * 2 if adds else [])])
        if OFFLOAD_LAYERS in names:
            parameters = (p.nbytes for p in self.step.model.parameters())
            taken += sum(map(aligned, (*parameters, *gradients, *(gradients if adds else ()))))
            taken += self.beside(names).states
        return taken

    def _copies(self, names: Names) -> float:
        """Return the seconds of copies between device and host, or a disk, in a step, as if none was hidden."""
        seconds = 0.0
        for directory in (name.partition(":")[2] for name in names if plain(name) == STATES_ON_DISK):
            disk, states = bandwidth(directory, self.step.device), self.beside(names).states
            seconds += states / disk.out + states / disk.back
        if not names & {OFFLOAD_GRADIENTS, OFFLOAD_STATES, OFFLOAD_LAYERS}:
            return seconds
        there, back = 1 / self.link.out, 1 / self.link.back
        parameters = bytes_of(self.step.model.parameters())
        gradients = bytes_of(
            p for g in self.step.optimizer.param_groups for p in g["params"] if p.requires_grad
        )
        count = micro_batches_of(names) * self.step.batches
        if OFFLOAD_GRADIENTS in names:
            seconds += count * gradients * (there + back)
        if OFFLOAD_STATES in names:
            seconds += self.beside(names).states * (there + back)
        if OFFLOAD_LAYERS in names:
            seconds += count * (2 * parameters * back + gradients * there)
        return seconds

    def step_seconds(self, names: Names) -> float:
        """Return the seconds of the optimizer's step, without copies; on the host where the parameters are there."""
        chosen = Names(names & {FUSED, EIGHT_BITS, FOUR_BITS, FACTORED, STEP_IN_BACKWARD, OFFLOAD_LAYERS})
        if of_optimizers(names) and not chosen:
            chosen = Names({FUSED})
        if chosen not in self._step_seconds:
            most = min(optimizers.TIMED, self.budget // 16)
            with left_as_it_is(self.step.model):
                self._step_seconds[chosen] = optimizers.step_seconds(
                    self.step.optimizer,
                    chosen - {OFFLOAD_LAYERS},
                    most,
                    torch.device("cpu") if OFFLOAD_LAYERS in chosen else self.step.device,
                )
        return self._step_seconds[chosen]

    def _plain(self, names: Names) -> ChainCosts:
        measured = self._measured_with(names).costs
        return chain_costs(measured, beside=0, accumulate=self._accumulates(names))

    def _accumulates(self, names: Names) -> bool:
        return not _going(names) and (self.accumulates or micro_batches_of(names) > 1)

    def least_seconds(self, names: Names) -> float:
        """Return a bound: these levers take no less, whatever is recomputed. MLPs in tiles are no faster than whole."""
        one = self.measured(micro_batches_of(names), names & (OTHER_FORWARD - {TILES}), Names()).costs
        seconds = sum(stage.full_forward + stage.backward for stage in one.stage_seconds)
        return seconds * micro_batches_of(names) * self.step.batches + self._beside_passes(names)

    def _beside_passes(self, names: Names) -> float:
        return self._copies(names) + self.step_seconds(names)

    def attempt(self, names: Names) -> Attempt:
        """Price a combination."""
        if names in self.attempts:
            return self.attempts[names]
        room = self._rooms.get(names, self.budget)
        measured = self._measured_with(names).costs
        costs = self._plain(names)
        optimizer, device = self._optimizer(names), self.step.device
        fixed = self._fixed(names)
        in_step = measured.standing_bytes + measured.workspace_bytes + fixed + measured.result_bytes
        in_step += sum(size.parameter_grad for size in measured.stage_bytes)
        in_step += sum(block_bytes(size, device) for size in optimizer.passing)
        plain = keep_all(costs.chain)
        in_passes = costs.fixed + fixed + costs.around.peak(plain)
        seconds, candidate = plain.seconds, None
        if names & SCHEDULES:
            try:
                candidate = self._candidate(names, fixed, room)
            except InfeasibleBudget:
                candidate = self._candidate(names, fixed, None)
            in_passes, seconds = candidate[0].predicted_bytes, candidate[0].schedule.seconds
        if in_step <= room < in_passes <= NEAR * self.budget:
            in_passes -= self._counted_twice(names, candidate, in_passes)
        least = max(in_passes, in_step)
        host = self._on_host(names, candidate)
        too_much = too_much_of_host(host, self.host_memory)
        count = micro_batches_of(names) * self.step.batches
        found = Attempt(
            names,
            least <= room and not too_much,
            in_passes,
            in_step,
            seconds * count + self._beside_passes(names),
            least + self._beyond.get(names, 0),
            fixed - self._besides(names),
            candidate,
            host,
            too_much,
        )
        self.attempts[names] = found
        return found

    def _candidate(self, names: Names, fixed: int, room: int | None) -> Candidate:
        """Return the fastest schedule within the room, or the one that takes least; without offloading where the host
        has too little memory for that. Raises InfeasibleBudget."""

        return plan_for(
            self._measured_with(names).costs,
            room,
            SLOTS,
            beside=fixed,
            accumulate=self._accumulates(names),
            whose=type(self.step.model).__name__,
            speed=self._speed(names),
            host_memory=self.host_left(names),
        )

    def _counted_twice(self, names: Names, candidate: Candidate | None, foreseen: int) -> int:
        """Return bytes by which passes take less than was worked out; 0 where none could be run.

        A chain counts what skips its stages for longer than it lives. They are the same whatever the optimizer is.
        """
        key = (micro_batches_of(names), names & OTHER_FORWARD, _going(names), names & SCHEDULES)
        if OFFLOAD_LAYERS in names:
            return 0
        if key not in self._less:
            try:
                taken = self._trial(names, candidate).in_passes
            except torch.OutOfMemoryError:
                taken = 0
            self._less[key] = max(0, foreseen - taken) if taken else 0
        return self._less[key]

    def to(self, names: Names) -> str | None:
        """Return the other place where stages may keep what they save: "8bit", "cpu", or none."""
        if CODED_ACTIVATIONS in names:
            return SAVED_ELSEWHERE[CODED_ACTIVATIONS]
        return "cpu" if self.step.device.type == "cuda" else None

    def host_left(self, names: Names) -> int | None:
        """Return the bytes of the host's memory that other levers leave to a schedule; None for no limit."""
        return None if self.host_memory is None else max(0, self.host_memory - self._on_host(names, None))

    def _speed(self, names: Names) -> Bandwidth | None:
        return None if (to := self.to(names)) is None else bandwidth(to, self.step.device)

    def _optimizer(self, names: Names) -> OptimizerBytes:
        """Return what the optimizer takes; nothing where its parameters are on the host."""
        return OptimizerBytes([], [], [], 0) if OFFLOAD_LAYERS in names else self.beside(names).taken

    # ---- trial steps -------------------------------------------------------------------------------------------------

    def stands(self, found: Attempt) -> bool:
        """Test a combination by steps. If they take more than the budget, its next attempt is worked out to take so
        much less."""
        if OFFLOAD_LAYERS in found.names:
            return True  # its parameters would have to leave
        if self._is_within(found):
            return True
        del self.attempts[found.names]
        room = min(self._rooms.get(found.names, self.budget), found.peak)
        self._rooms[found.names] = room - (found.tested - self.budget)
        self._beyond[found.names] = max(0, found.tested - found.peak)
        return False

    def _is_within(self, found: Attempt) -> bool:
        """Take steps by a combination, and note what they took."""
        try:
            steps = self._trial(found.names, found.candidate)
        except torch.OutOfMemoryError:
            steps = ran_out(self.budget)
        found.tested = max(steps.in_passes, steps.in_step)
        count = micro_batches_of(found.names) * self.step.batches
        found.tested_seconds = steps.seconds * count + self._beside_passes(found.names)
        if found.candidate is not None:
            note_trial(found.candidate[0], self.budget, steps)
        logger.debug(
            "memopt.fit: %s took %d, and %d was worked out", sorted(found.names), found.tested, found.peak
        )
        return found.tested <= self.budget

    def with_more_room(self, found: Attempt) -> Attempt:
        """Return a tested combination by a faster schedule, where its steps leave room and those of that one stand."""
        if found.candidate is None or not found.tested:
            return found
        names, count = found.names, micro_batches_of(found.names) * self.step.batches
        earlier, tested = found.candidate[0], [found]

        def taken_by(candidate: Candidate) -> int:
            plan = candidate[0]
            faster = replace(
                found,
                in_passes=plan.predicted_bytes,
                seconds=found.seconds - (earlier.schedule.seconds - plan.schedule.seconds) * count,
                candidate=candidate,
                host=self._on_host(names, candidate),
            )
            self._is_within(faster)
            tested.append(faster)
            return faster.tested

        fastest = faster_within(
            found.candidate,
            self._rooms.get(names, self.budget),
            None,
            self.budget,
            lambda room: self._candidate(names, self._fixed(names), room),
            taken_by,
        )
        self.attempts[names] = next(one for one in tested if one.candidate is fastest)
        return self.attempts[names]

    def planned(self, found: Attempt) -> ShapePlan | None:
        """Return the schedule that a combination was tested with, for its model to run by; None without either."""
        if found.candidate is None or OFFLOAD_LAYERS in found.names:
            return None
        measured = self._measured_with(found.names)
        plan = found.candidate[0]
        plan.offload = self.to(found.names)
        forwards = stage_forwards(plan, measured.chain.members, False)
        return ShapePlan(measured.shape, plan, forwards, measured.seconds, self._accumulates(found.names))

    def _trial(self, names: Names, candidate: Candidate | None) -> TrialSteps:
        measured = self._measured_with(names)
        optimizer = self._optimizer(names)
        optimizer = optimizer._replace(unseen=optimizer.unseen + self._besides(names))
        with self._as_with(micro_batches_of(names), names & OTHER_FORWARD, _going(names)):
            if candidate is not None:
                forward = planned_forward(candidate, measured.costs, measured.chain, self.to(names))
            else:
                forward = _plain_forward(measured)
            return bytes_of_step(measured.costs, forward, optimizer, accumulate=self._accumulates(names))


def micro_batches_of(names: Iterable[str]) -> int:
    """Return the number of micro-batches in a combination."""
    return next((int(name.partition(":")[2]) for name in names if name.startswith(MICRO_BATCHES)), 1)


def _plain_forward(measured: Measured) -> Callable[[], tuple[Any, Tensor]]:
    def forward() -> tuple[Any, Tensor]:
        with torch.enable_grad():
            chain = measured.chain
            return None, measured.costs.loss(chain.model(*chain.args, **chain.kwargs))

    return forward


def _going(names: Names) -> Names:
    """Return the levers that decide what gradients take that leave the device as they are made; none if they stay."""
    if STEP_IN_BACKWARD in names:
        return Names(
            names
            & {
                STEP_IN_BACKWARD,
                *((OFFLOAD_STATES, EIGHT_BITS, FOUR_BITS, FACTORED) if OFFLOAD_STATES in names else ()),
            }
        )
    return Names(names & {OFFLOAD_GRADIENTS, OFFLOAD_LAYERS})
