"""From a chain's measured costs and a budget to a plan that has been tested, and the operations that carry it out.

A stage is given to the solver with its ways to run as options. Of the plans that it finds, each is tested by a step and
compared with the allocator's figures: a chain's cost is a sum of parts, each measured by itself, and the sizes of the
allocator's blocks, and the memory that autograd and the caller hold between the parts, show in a whole step only."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memopt._checkpoint.plan import REST, SAVING, Plan, StepOverhead, fastest, leanest
from memopt._checkpoint.stages import ranks
from memopt._checkpoint.stages.costs import (
    AllocatorBytes,
    StageBytes,
    StageSeconds,
    allocator_bytes,
    block_bytes,
    local,
    workspace_bytes,
)
from memopt._checkpoint.stages.measure import ChainMeasurement, Crossing, expand, group, passing
from memopt._offload.pinned_memory import aligned
from memopt._offload.schedule_sets import OPTION, Bandwidth, CodingSpeed
from memopt._runtime import device_clock
from memopt._runtime.log import logger
from memopt.chain import Chain, InfeasibleBudget, Op, Option, Schedule, Stage
from memopt.optim._state_bytes import OptimizerBytes

TRIES = 8
USED = 0.97  # of the budget: a plan whose steps take less is worth another try
LARGER = 2  # tries for that
STEPS = 3  # the optimizer's state comes after the first one; what is cached by then may be split otherwise in the next
SPARE = 256  # a least budget that is named has so many parts and one more: a device's cached blocks differ a little
SPARE_OF_RANKS = 2048  # bytes at least: what collectives' threads hold differs from step to step

Candidate = tuple[Plan, list[Op], set[int]]
Forward = Callable[[], tuple[Any, torch.Tensor]]  # returns the result and the loss, by a plan


def chain_stage(
    name: str, size: StageBytes, time: StageSeconds, speed: Bandwidth | None, movable_input: int = 0
) -> Stage:
    """Return a stage for the solver, with its ways to run as options.

    To keep only its output takes, for a while, the memory of what the other way saves. The chain counts that overhead
    for the stage's own way, so saving everything is a separate option where it takes less. Offloading what the stage
    alone holds, or keeping it in 8 bits, at that speed, is another. movable_input: bytes of its input that can be
    offloaded, too; to the solver that takes the time of the way there beyond the stage's own run, and all of the way
    back.
    """
    own = Stage(
        saved_bytes=size.saved,
        output_bytes=size.output,
        forward_seconds=time.full_forward,
        backward_seconds=time.backward,
        forward_overhead_bytes=max(size.forward_overhead, size.run_overhead),
        backward_overhead_bytes=size.backward_overhead,
        remake_seconds=min(time.remake, time.full_forward),
        input_grad_bytes=size.input_grad,
        name=name,
    )
    options = []
    if size.run_overhead > size.forward_overhead:
        options.append(
            Option(
                SAVING,
                size.saved,
                time.full_forward,
                time.backward,
                size.forward_overhead,
                size.backward_overhead,
                own.remake_seconds,
            )
        )
    if isinstance(speed, CodingSpeed):
        if size.codable:
            options.append(coded(size, time, speed, own.remake_seconds))
    elif speed is not None:
        if size.movable:
            options.append(offloaded(size, time, speed, own.remake_seconds))
        if movable_input:
            out = speed.forward(time.full_forward, movable_input) - time.full_forward
            own = replace(own, put_input_seconds=out, get_input_seconds=speed.backward(0.0, movable_input))
    return replace(own, options=tuple(options))


def offloaded(size: StageBytes, time: StageSeconds, speed: Bandwidth, remake_seconds: float | None) -> Option:
    """Return the option of offloading what the stage alone holds."""
    stays = max(size.saved - size.movable, size.output)
    goes = size.saved - stays  # it is there while the stage runs, either way
    return Option(
        OPTION,
        stays,
        speed.forward(time.full_forward, size.movable),
        speed.backward(time.backward, size.movable),
        size.forward_overhead + goes,
        size.backward_overhead + goes,
        remake_seconds,
    )


def coded(size: StageBytes, time: StageSeconds, speed: CodingSpeed, remake_seconds: float | None) -> Option:
    """Return the option of keeping in 8 bits what the stage alone holds: it is all there until the stage has run, and
    comes back storage by storage."""
    stays = max(size.saved - size.codable, size.output) + size.codes
    return Option(
        OPTION,
        stays,
        speed.forward(time.full_forward, size.codes),
        speed.backward(time.backward, size.codes),
        max(0, size.saved - stays + max(size.forward_overhead, size.coding_overhead)),
        size.late_overhead,
        remake_seconds,
    )


class ChainCosts(NamedTuple):
    """A measured chain as the solver has it.

    fixed: bytes that live however its stages are run. groups: of its stages, each one for the solver.
    """

    chain: Chain
    around: StepOverhead
    fixed: int
    sizes: list[StageBytes]
    times: list[StageSeconds]
    groups: list[range]


def chain_costs(
    measured: ChainMeasurement, *, beside: int, accumulate: bool, speed: Bandwidth | None = None
) -> ChainCosts:
    """Return a measured chain's costs. The arguments are plan_for()'s."""
    names = measured.chain.names
    groups = group(measured.stage_bytes[:-1])
    sizes, times = measured.of_groups(groups)
    joined = [*(", ".join(names[k] for k in members) for members in groups), REST]
    fixed = beside + measured.standing_bytes + measured.held_bytes + measured.workspace_bytes
    gradients = [size.parameter_grad for size in sizes]
    if accumulate:  # what a backward makes is added to them, and goes
        fixed += sum(gradients)
        gradients = [0] * len(sizes)
    movable = [0, *(_movable_input(measured, *pair) for pair in itertools.pairwise(groups)), 0]
    stages = [
        chain_stage(name, size, time, speed, given)
        for name, size, time, given in zip(joined, sizes, times, movable, strict=True)
    ]
    chain = Chain(tuple(stages), input_bytes=measured.input_bytes)
    outputs = [0 if size.saves_output else size.output for size in sizes]
    last = sizes[-2].output if measured.returns_last else 0
    remade = [size.saved_beside_output + size.remake_overhead for size in sizes]
    at = {k: g for g, members in enumerate(groups) for k in members}
    external = [(at[one.taken_by], at.get(one.made_by, -1), one.nbytes) for one in measured.external_grads]
    dies = not sizes[-1].saves_input
    full = [size.saved + size.forward_overhead for size in sizes]
    crossing = [
        # The chain counts it too while the saved set of the run that made it is there.
        (
            at[one.made_by],
            one.nbytes,
            one.nbytes if _keeps_output(measured, groups[at[one.made_by]], one) else 0,
        )
        for one in measured.crossings
    ]
    around = StepOverhead(
        gradients, outputs, remade, measured.result_bytes, last, external, dies, full, crossing
    )
    return ChainCosts(chain, around, fixed, sizes, times, groups)


def _movable_input(measured: ChainMeasurement, before: range, members: range) -> int:
    """Return the bytes of these stages' input, made by those before, if it can be offloaded until they run again."""
    made, taken = measured.stage_bytes[before.stop - 1], measured.stage_bytes[members.start]
    skips = any(one.is_output and one.made_by == before.stop - 1 for one in measured.crossings)
    return 0 if made.output_stays or skips or taken.changes_input else made.output


def _keeps_output(measured: ChainMeasurement, members: range, crossing: Crossing) -> bool:
    """Return whether the saved set of these stages, as the solver has it, includes a tensor that skips stages."""
    last = measured.stage_bytes[members.stop - 1]
    is_last = crossing.is_output and crossing.made_by == members.stop - 1
    return is_last and (last.output > 0 or last.saves_output)


def plan_for(
    measured: ChainMeasurement,
    budget: int | None,
    slots: int,
    *,
    beside: int,
    accumulate: bool,
    whose: str,
    speed: Bandwidth | None = None,
    host_memory: int | None = None,
) -> Candidate:
    """Return the plan for a chain, and a ChainRunner's arguments: operations, and stages whose input only passes.

    budget: None for the plan that takes least. beside: bytes that live throughout, and were not measured. accumulate:
    gradients exist when a step begins. whose: for InfeasibleBudget's text. speed: of offloading, where stages may.
    host_memory: bytes that what is offloaded may take; where it would take more, nothing is.
    """
    chain, around, fixed, sizes, times, groups = chain_costs(
        measured, beside=beside, accumulate=accumulate, speed=speed
    )
    schedule: Schedule | None
    allowed = budget
    if budget is None:
        schedule, least = leanest(chain, around, slots)
        budget = fixed + least
    else:
        schedule, least = fastest(chain, around, budget - fixed, slots)
    if schedule is None:
        least += fixed
        raise InfeasibleBudget(
            f"memory_budget is {budget} bytes, but {whose} takes at least {least} on this sample, {fixed} of them "
            f"regardless of how its {len(measured.chain.names)} stages are run: raise memory_budget to {least} or "
            "more, or use a smaller batch",
            least,
        )
    plan = Plan(
        sizes, times, chain, schedule, around, budget, fixed, measured.crossing_bytes, slots, bandwidth=speed
    )
    if not isinstance(speed, CodingSpeed):
        plan.offload_slots = {
            k: measured.stage_bytes[k].movable_room for g in plan.offloaded for k in groups[g]
        }
        plan.offload_slots |= {~groups[g].start: aligned(sizes[g - 1].output) for g in plan.inputs_offloaded}
        if host_memory is not None and sum(plan.offload_slots.values()) > host_memory:
            return plan_for(
                measured,
                allowed,
                slots,
                beside=beside,
                accumulate=accumulate,
                whose=whose,
            )
    return plan, expand(plan.operations, groups), passing(groups)


# ---- plans tested by a step ------------------------------------------------------------------------------------------


class TrialSteps(NamedTuple):
    """The most bytes alive in a forward and backward pass, and while the optimizer steps; seconds of the passes.

    standing: of these bytes those that are there before and after a step, the optimizer's state among them; not
    cuBLAS's workspaces, since nothing tells whether they are.
    """

    in_passes: int
    in_step: int
    seconds: float = 0.0
    standing: int = 0


def checked_plan(
    measured: ChainMeasurement,
    budget: int,
    slots: int,
    *,
    beside: OptimizerBytes,
    accumulate: bool,
    whose: str,
    forward_by: Callable[[Candidate], Forward],
    speed: Bandwidth | None = None,
    distributed: bool = False,
    or_least: bool = False,
    host_memory: int | None = None,
) -> Candidate:
    """The fastest plan whose step is within the budget; with `or_least`, if there is none, the one that takes least.

    beside: the optimizer's. accumulate: gradients are there when a step begins. whose: for InfeasibleBudget's words.
    forward_by: the forward pass of a plan. speed: of offloading, which takes host_memory at most. distributed: over
    ranks, which then find the same."""
    device = measured.device
    fixed = beside.there_bytes + sum(block_bytes(size, device) for size in beside.coming)

    def candidate(room: int | None) -> Candidate:
        return plan_for(
            measured,
            room,
            slots,
            beside=fixed,
            accumulate=accumulate,
            whose=whose,
            speed=speed,
            host_memory=host_memory,
        )

    def tried(found: Candidate) -> TrialSteps:
        plan = found[0]
        taken = bytes_of_step(measured, forward_by(found), beside, accumulate=accumulate)
        if distributed:
            in_passes, in_step = ranks.most(measured, taken[:2])
            taken = taken._replace(in_passes=in_passes, in_step=in_step)
        logger.debug(
            "auto_checkpoint: a step under a plan for %d bytes took %d, %d while the optimizer stepped; the budget "
            "is %d",
            plan.peak_bytes,
            *taken[:2],
            budget,
        )
        note_trial(plan, budget, taken)
        return taken

    def taken_by(found: Candidate) -> TrialSteps:
        try:
            return tried(found)
        except torch.OutOfMemoryError:
            if distributed:
                raise  # the other ranks wait in this one's collectives
            return ran_out(budget)

    room = budget
    beyond: Beyond | None = None
    for _ in range(TRIES):
        try:
            found = candidate(room)
        except InfeasibleBudget:
            break
        foreseen = found[0].peak_bytes
        taken = taken_by(found)
        if found[0].peak_bytes <= budget and max(taken[:2]) <= budget:
            if distributed:
                return found
            return faster_within(
                found, room, beyond, budget, candidate, lambda other: max(taken_by(other)[:2])
            )
        if taken.in_step > budget:
            break  # whatever the stages do
        beyond = Beyond(room, taken.in_passes, found[0].schedule)
        room = min(room, foreseen) - (taken.in_passes - budget)
    found = candidate(None)
    taken = tried(found)
    plan = found[0]
    if plan.peak_bytes <= budget or or_least:
        return found
    least = plan.peak_bytes + max(plan.peak_bytes // SPARE, SPARE_OF_RANKS if distributed else 0)
    if taken.in_step > taken.in_passes:
        for_what = (
            f"when the optimizer steps, which takes {sum(beside.passing)} besides parameters, gradients and state: "
            f"raise memory_budget to {least} or more, or use an optimizer that takes less (foreach=False, or one of "
            "memopt.optim)"
        )
    else:
        for_what = (
            f"{plan.fixed_bytes} of them regardless of how its {len(measured.chain.names)} stages are run: raise "
            f"memory_budget to {least} or more, or use a smaller batch"
        )
    raise InfeasibleBudget(
        f"memory_budget is {budget} bytes, but {whose} takes at least {least} on this sample, {for_what}",
        least,
    )


class Beyond(NamedTuple):
    """A room with which steps took more than the budget: so many bytes, by this schedule."""

    room: int
    taken: int
    schedule: Schedule


def faster_within(
    found: Candidate,
    room: int,
    beyond: Beyond | None,
    budget: int,
    candidate: Callable[[int], Candidate],
    taken_by: Callable[[Candidate], int],
) -> Candidate:
    """Return the fastest of plans whose steps are within a budget, where those of a tested one leave some of it.

    room: the plan's. beyond: a larger one, which was too large. candidate: the plan for a room. taken_by: the bytes
    that steps by a plan take.
    """
    for _ in range(LARGER):
        more = room_left(found[0], room, beyond, budget)
        if more is None:
            break
        try:
            other = candidate(more)
        except InfeasibleBudget:  # found was the least, and foretold to take more than it did
            break
        schedule = other[0].schedule
        if schedule.seconds >= found[0].schedule.seconds or (beyond and schedule.ops == beyond.schedule.ops):
            break
        taken = taken_by(other)
        if taken <= budget:
            found, room = other, more
        else:
            beyond = Beyond(more, taken, schedule)
    return found


def room_left(plan: Plan, room: int, beyond: Beyond | None, budget: int) -> int | None:
    """Return the room with which a tested plan could use the budget, if it leaves some: as much too much may be
    foretold again, or, if a larger room is known to be too large, what is taken may grow evenly up to that one's."""
    if plan.keeps_all or plan.peak_bytes >= USED * budget:
        return None
    if beyond is None:
        return budget + max(0, plan.predicted_bytes - plan.peak_bytes)
    wanted = int((1 + USED) / 2 * budget) - plan.peak_bytes
    return room + wanted * (beyond.room - room) // (beyond.taken - plan.peak_bytes)


def ran_out(budget: int) -> TrialSteps:
    """Return what steps count as that ran out of memory: a little more than the budget, so that a little less is tried
    next."""
    return TrialSteps(budget + budget // 32, 0)


def note_trial(plan: Plan, budget: int, taken: TrialSteps) -> None:
    """Have a plan hold what its trial steps took, beside what was foretold, and the budget that it is held to."""
    plan.memory_budget = budget
    plan.peak_bytes = max(taken[:2]) or plan.predicted_bytes
    plan.standing_bytes = taken.standing
    plan.ran_in(taken.seconds)


def bytes_of_step(
    measured: ChainMeasurement, forward: Forward, beside: OptimizerBytes, *, accumulate: bool
) -> TrialSteps:
    """Return the most bytes alive in a training step, by the device's allocator; zeros if it cannot be asked.

    Gradients are dropped afterwards.
    """
    device = measured.device
    allocator = allocator_bytes(device, blocks=True)
    if type(allocator) is AllocatorBytes:
        return TrialSteps(0, 0)
    measured.clear_gradients()
    gc.collect()  # else garbage of before goes in the middle, and so would what has been cast
    torch.clear_autocast_cache()
    workspace_bytes(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    storages = [local(t).untyped_storage() for t in (*measured.standing, *beside.there)]
    mapped = {t.untyped_storage()._cdata for t in measured.mapped}
    storages = [one for one in (*storages, *measured.others) if one.device == device]
    standing = allocator.of_storages(
        {one._cdata: one for one in storages if one._cdata not in mapped}.values()
    )
    standing += measured.mapped_bytes
    most = stepping = 0
    seconds, clock = [], device_clock.clock
    state: Sequence[torch.Tensor] = ()
    held: tuple[Any, torch.Tensor] | None = None  # by its caller, until the next step
    allocator.start()
    try:
        before, _ = allocator.restart()
        for n in range(STEPS):
            allocator.restart()
            timed = n >= STEPS - clock.repeats
            with clock.running() if timed else nullcontext():
                begun = clock.now(device)
                held = forward()
                with out_of_autocast(device):
                    held[1].backward()
                ended = clock.now(device)
            if timed:
                seconds.append(clock.between(begun, ended))
            _, peak = allocator.now_and_peak()
            if n == 0:
                state = [torch.empty(size, dtype=torch.uint8, device=device) for size in beside.coming]
            # In blocks of their own: one that is hardly larger than what is asked for is not split.
            passing = [torch.empty(size, dtype=torch.uint8, device=device) for size in beside.passing]
            now, _ = allocator.now_and_peak()
            del passing
            most = max(most, peak - before)
            stepping = max(stepping, now - before)
            if not accumulate:
                measured.clear_gradients()
    finally:
        allocator.stop()
        measured.clear_gradients()
        del held, state
    standing += beside.unseen
    median = statistics.median(seconds)
    if not most:
        return TrialSteps(0, 0, median)
    there = standing + sum(block_bytes(size, device) for size in beside.coming)
    return TrialSteps(most + standing, stepping + standing, median, there)


@contextmanager
def out_of_autocast(device: torch.device) -> Iterator[None]:
    """Enter the state after the `with torch.autocast()` of a forward pass: no cached casts, and none is kept."""
    kinds = [kind for kind in dict.fromkeys((device.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not enabled:
        yield
        return
    depth = 0
    while torch.autocast_decrement_nesting() > 0:
        depth += 1
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth + 1):
            torch.autocast_increment_nesting()
