"""From a chain's costs and a budget to the operations that a ChainRunner carries out."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from memopt import _C
from memopt._checkpoint.plan.plan import REST, SAVING, Plan, StepOverhead, fastest, leanest
from memopt._checkpoint.stages.costs import StageBytes, StageSeconds
from memopt._checkpoint.stages.groups import expand, group, passing
from memopt._checkpoint.stages.measure import ChainMeasurement
from memopt._offload.bandwidth import Bandwidth
from memopt._offload.schedule_sets import OPTION
from memopt.chain import Chain, InfeasibleBudget, Op, Option, Schedule, Stage


def budget_bytes(memory_budget: int | float | str, device: torch.device) -> int:
    """A fraction of the device's memory, or of the machine's for a CPU; else bytes."""
    if isinstance(memory_budget, float):
        if not 0 < memory_budget <= 1:
            raise ValueError(
                f"memory_budget is {memory_budget}: a float is a fraction of the device's memory, above 0 and at most "
                '1; give bytes as an int, or a size like "8GiB"'
            )
        if device.type == "cpu":
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            total = torch.get_device_module(device.type).get_device_properties(device).total_memory
        return int(total * memory_budget)
    return _C.parse_size(memory_budget)


def chain_stage(name: str, size: StageBytes, time: StageSeconds, speed: Bandwidth | None) -> Stage:
    """Return a stage for the solver, with its ways to run as options.

    To keep only its output takes, for a while, the memory of what the other way saves. The chain counts that overhead
    for the stage's own way, so saving everything is a separate option where it takes less. Offloading what the stage
    alone holds, at that speed, is another.
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
    if speed is not None and size.movable:
        stays = max(size.saved - size.movable, size.output)
        goes = size.saved - stays  # it is there while the stage runs, either way
        options.append(
            Option(
                OPTION,
                stays,
                speed.forward(time.full_forward, size.movable),
                speed.backward(time.backward, size.movable),
                size.forward_overhead + goes,
                size.backward_overhead + goes,
                own.remake_seconds,
            )
        )
    return replace(own, options=tuple(options))


def plan_for(
    measured: ChainMeasurement,
    budget: int | None,
    slots: int,
    *,
    beside: int,
    accumulate: bool,
    whose: str,
    speed: Bandwidth | None = None,
) -> tuple[Plan, list[Op], set[int]]:
    """Return the plan for a chain, and a ChainRunner's arguments: operations, and stages whose input only passes.

    budget: None for the plan that takes least. beside: bytes that live throughout, and were not measured. accumulate:
    gradients exist when a step begins. whose: for InfeasibleBudget's text. speed: of offloading, where stages may.
    """
    names = measured.chain.names
    groups = group(measured.stage_bytes[:-1])
    sizes, times = measured.of_groups(groups)
    joined = [*(", ".join(names[k] for k in members) for members in groups), REST]
    fixed = beside + measured.standing_bytes + measured.held_bytes + measured.workspace_bytes
    gradients = [size.parameter_grad for size in sizes]
    if accumulate:  # what a backward makes is added to them, and goes
        fixed += sum(gradients)
        gradients = [0] * len(sizes)
    stages = [chain_stage(*stage, speed) for stage in zip(joined, sizes, times, strict=True)]
    chain = Chain(tuple(stages), input_bytes=measured.input_bytes)
    outputs = [0 if size.saves_output else size.output for size in sizes]
    last = sizes[-2].output if measured.returns_last else 0
    remade = [size.saved_beside_output + size.remake_overhead for size in sizes]
    at = {k: g for g, members in enumerate(groups) for k in members}
    external = [(at[one.taken_by], at.get(one.made_by, -1), one.nbytes) for one in measured.external_grads]
    around = StepOverhead(gradients, outputs, remade, measured.result_bytes, last, external)
    schedule: Schedule | None
    if budget is None:
        schedule, least = leanest(chain, around, slots)
        budget = fixed + least
    else:
        schedule, least = fastest(chain, around, budget - fixed, slots)
    if schedule is None:
        least += fixed
        raise InfeasibleBudget(
            f"memory_budget is {budget} bytes, and {whose} takes at least {least} on this sample, {fixed} of them for "
            f"what lives however its {len(names)} stages are run: give it {least} or more, or a smaller batch",
            least,
        )
    plan = Plan(sizes, times, chain, schedule, around, budget, fixed, speed)
    plan.offload_slots = {k: measured.stage_bytes[k].movable_room for g in plan.offloaded for k in groups[g]}
    return plan, expand(plan.operations, groups), passing(groups)
