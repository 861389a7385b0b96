"""The result of auto_checkpoint: the stages found, their measured costs, the schedule chosen, and the reasons."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt._offload.schedule_sets import OPTION, CodingSpeed
from memopt._runtime.results import Result
from memopt._runtime.table import ResultTable, paragraphs
from memopt.chain import Chain, Op, Option, Schedule, Stage, Table

if TYPE_CHECKING:
    from memopt._checkpoint.runner import ChainRunner
    from memopt._checkpoint.stages.costs import StageBytes, StageSeconds
    from memopt._offload.schedule_sets import Bandwidth

REST = "(rest of the model)"
SLOTS = 500  # of a budget, for the solver
SAVING = "save"  # the option of a stage to save everything
RUNS = {"fall": "all", "fck": "its input", "fnone": "nothing"}
_AWAY, _CODED = ", offloaded", ", in 8 bits"
_HEADS = ("stage", "saves", "output", "forward", "backward", "runs", "at first keeps")


class StepOverhead(NamedTuple):
    """Memory of a step that the chain's own costs do not include, or include for too short a time.

    gradients: bytes of parameter gradients that stage i's backward leaves behind; while it runs, its overhead counts
    them. outputs: bytes of stage i's output, 0 where stage i itself saves it; they are freed by the backward of stage i
    + 1. remade: most bytes that stage i makes when it runs again right before its backward and stops early; full: when
    it runs and saves everything, where the chain has the larger overhead of a run that keeps its output alone. result:
    bytes of the model's return value, which the caller may keep; last: the part of them in the last stage's output.
    dies: whether that output, which the last stage itself does not save, is gone once the loss is computed. external:
    gradients of arguments that skip stages, as (stage whose backward makes it, stage whose backward uses it or -1,
    bytes). crossing: such arguments, which count throughout otherwise, as (stage whose first run makes it, bytes, those
    that the saved set of this run has too); they stay until the step's end.
    """

    gradients: Sequence[int]
    outputs: Sequence[int]
    remade: Sequence[int]
    result: int
    last: int
    external: Sequence[tuple[int, int, int]] = ()
    dies: bool = False
    full: Sequence[int] = ()
    crossing: Sequence[tuple[int, int, int]] = ()

    def peak(self, schedule: Schedule) -> int:
        return max(self.during(schedule))

    def during(self, schedule: Schedule) -> list[int]:
        """Return the bytes at each operation."""
        rest = len(self.gradients) - 1  # what comes after the stages
        made = 0
        there: list[int] = []
        following = rest + 1  # its gradient is there
        saved: set[int] = set()
        ran: set[int] = set()
        first: set[int] = set()  # of the saved, those of their stage's first run
        for operation, moment, after in zip(
            schedule.ops, schedule.moments, [*schedule.ops[1:], ("", -1)], strict=True
        ):
            op, stage, *_ = operation
            now = moment.during_bytes + made
            again = stage in ran
            for maker, size, shared in self.crossing:
                if maker not in ran:
                    now -= size
                elif maker in first:
                    now -= shared
            ran.add(stage)
            if op == "fall" and again and after[:2] == ("bwd", stage):
                now -= max(0, in_full(schedule.chain, operation) - self.remade[stage])
            elif op == "fall" and len(operation) == 2 and self.full:
                now -= max(0, in_full(schedule.chain, operation) - self.full[stage])
            if following <= rest:
                # The caller's, but not twice while the last stage's saved set is there.
                now += self.result + (0 if rest - 1 in saved else self.last)
            behind = min(following, rest) - 1
            if following > rest and self.dies and not self.last and rest in saved and behind not in saved:
                now -= self.outputs[behind]  # what the stages returned without a graph of their own
            gone = following < rest or (
                not self.last and (following == rest or (self.dies and rest in saved))
            )
            if gone and behind in saved - {
                maker for maker, _, shared in self.crossing if shared and maker in first
            }:
                now -= self.outputs[behind]
            there.append(now)
            if op == "fall":
                saved.add(stage)
                if not again:
                    first.add(stage)
            elif op in ("bwd", "drop_saved"):
                saved.discard(stage)
                first.discard(stage)
            if op == "bwd":
                made += self.gradients[stage]
                made += sum(size for begin, _, size in self.external if begin == stage)
                made -= sum(size for _, end, size in self.external if end == stage)
                following = stage
        return there


def in_full(chain: Chain, operation: Op) -> int:
    """Return the bytes that the chain counts for a `fall`."""
    _, k, *name = operation
    stage = chain.stages[k]
    way = next((option for option in stage.options if name and option.name == name[0]), stage)
    return way.saved_bytes + way.forward_overhead_bytes


def without_clock(chain: Chain) -> Chain:
    """Return the chain with seconds that depend on its bytes alone, in proportion to each stage's saved bytes."""

    def unmeasured(way: Stage | Option) -> dict[str, Any]:
        seconds = float(way.saved_bytes)
        return {"forward_seconds": seconds, "backward_seconds": seconds, "remake_seconds": None}

    stages, given = [], chain.input_bytes
    for stage in chain.stages:
        options = tuple(replace(option, **unmeasured(option)) for option in stage.options)
        stage = replace(stage, **unmeasured(stage), options=options)
        if stage.put_input_seconds is not None:
            stage = replace(stage, put_input_seconds=0.0, get_input_seconds=float(given))
        given = stage.output_bytes
        stages.append(stage)
    return replace(chain, stages=tuple(stages))


def fastest(
    chain: Chain, around: StepOverhead, memory_budget: int, slots: int
) -> tuple[Schedule | None, int]:
    """Return the fastest schedule within the budget, memory around the chain included, and the least peak known.

    Gradients are made when most saved tensors are gone; counting them from the start would waste that much.
    """
    # Where the chain counts an output longer than it lives, or a forward that ends early in full, its peak is above the
    # true one.
    least = map(min, around.remade, around.full) if around.full else around.remade
    early = [max(0, in_full(chain, ("fall", k)) - size) for k, size in enumerate(least)]
    more = max(*around.outputs, *early) + sum(size for _, size, _ in around.crossing)
    table = Table(chain, max(memory_budget + more, 0), slots)
    for budget, _ in sorted(table.curve(), reverse=True):
        schedule = table.schedule(budget)
        peak = around.peak(schedule)
        if peak <= memory_budget:
            return schedule, peak
    lean, peak = leanest(chain, around, slots)
    return (lean if peak <= memory_budget else None), peak


def leanest(chain: Chain, around: StepOverhead, slots: int) -> tuple[Schedule, int]:
    """Return the schedule with the least known peak, memory around the chain included, and that peak.

    It depends neither on the stages' seconds nor on a budget, so it stays the same when other seconds are measured.
    """
    unclocked = without_clock(chain)
    table = Table(unclocked, 2 * Table(unclocked, 0, slots).least_budget, slots)
    found = [Schedule(chain, table.schedule(budget).ops) for budget, _ in table.curve()]
    least = min(found, key=around.peak)
    return least, around.peak(least)


def keep_all(chain: Chain) -> Schedule:
    """Return the plain step, in which each stage saves everything by its cheapest option."""
    ways = [
        ((k, SAVING) if any(option.name == SAVING for option in stage.options) else (k,))
        for k, stage in enumerate(chain.stages)
    ]
    return Schedule(chain, [("fall", *way) for way in ways] + [("bwd", *way) for way in reversed(ways)])


def with_copies(
    schedule: Schedule, during: Sequence[int], nbytes: Sequence[int] | None, memory_budget: int
) -> tuple[list[Op], int]:
    """The operations for the runner, with the times of the copies of offloaded sets; and the peak.

    To the solver a set leaves while its own stage runs forwards and returns while it runs backwards, whole in both. An
    input leaves so, too, and returns beside nothing. Where the budget leaves room, copies get more time: "sent" and
    "put_input", which wait for the copies and let the memory go, come after the next stage's run, "fetch" and
    "fetch_input" before the backward of the stage behind. So they overlap with those too. Options of no concern to the
    runner are left out.

    during: bytes that are there at each operation. nbytes: of each stage's set; None where nothing is copied.
    """
    ops, there = schedule.ops, list(during)
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)

    def room(first: int, last: int, more: int) -> bool:
        """Takes `more` bytes during these operations, if they are there."""
        fits = all(there[n] + more <= memory_budget for n in range(first, last + 1))
        if fits:
            for n in range(first, last + 1):
                there[n] += more
        return fits

    later: set[int] = set()
    for at, (op, k, *option) in enumerate(ops):
        if op == "fall" and option == [OPTION] and nbytes is not None:
            ends, size = [("bwd", k), ("drop_saved", k)], nbytes[k]
            leaves, comes = ("sent", k), ("fetch", k)
        elif op == "put_input":
            ends, size = [("get_input", k)], schedule.chain.stages[k - 1].output_bytes
            leaves, comes = ("put_input", k), ("fetch_input", k)
        else:
            continue
        end = next(n for n in range(at, len(ops)) if ops[n][:2] in ends)
        following = next((n for n in range(at + 1, end) if ops[n][0] in RUNS), None)
        behind = next((n for n in reversed(range(at + 1, end)) if ops[n][0] == "bwd"), None)
        if following is not None and room(at + 1, following, size):
            after[following].append(leaves)
            later |= {at} if op == "put_input" else set()
        if ops[end][0] in ("bwd", "get_input") and behind is not None and room(behind, end - 1, size):
            before[behind].append(comes)
    out: list[Op] = []
    for n, (op, k, *option) in enumerate(ops):
        own: list[Op] = [] if n in later else [(op, k, OPTION) if option == [OPTION] else (op, k)]
        out += [*before[n], *own, *after[n]]
    return out, max(there)


@dataclass(frozen=True, repr=False)
class PlanCheck(Result):
    """The peak of a planned model's steps beside its budget; str() says it in a line.

    Attributes:
        memory_budget: Bytes.
        predicted_bytes: Peak that the stages' bytes foretell.
        trial_bytes: The most that the allocator gave in the trial steps.
        measured_bytes: The most that it gave in the steps since; None if none has shown: before the first one, or where
            a recording watches the CPU's allocator.
    """

    memory_budget: int
    predicted_bytes: int
    trial_bytes: int
    measured_bytes: int | None

    @property
    def within(self) -> bool:
        """Return whether all steps so far, the trial steps included, were within the budget."""
        return max(self.trial_bytes, self.measured_bytes or 0) <= self.memory_budget

    def __str__(self) -> str:
        size = _C.format_size
        own = "no step yet" if self.measured_bytes is None else f"{size(self.measured_bytes)} in its steps"
        return (
            f"predicted {size(self.predicted_bytes)}, {size(self.trial_bytes)} in trial steps, {own}: "
            f"{'within' if self.within else 'above'} the budget of {size(self.memory_budget)}"
        )


class Plan(Result):
    """The plan of a checkpointed model, `model.plan`; str() explains it.

    Attributes:
        stages: Names of the modules in the order in which they run; modules that form one stage are listed together.
        chain: The memopt.chain.Chain. Its last stage is everything after the stages, the loss included.
        schedule: The memopt.chain.Schedule of a step.
        measured_bytes: Measured bytes of each stage.
        measured_seconds: Measured seconds of each stage.
        memory_budget: Bytes, of everything that lives in a forward and backward pass.
        fixed_bytes: Bytes that live however the stages run: parameters, buffers, the optimizer's state, the sample,
            tensors saved around the stages, and memory of the stages besides each other's outputs.
        crossing_bytes: The part of them in tensors that skip stages (of a U-Net, say), each counted once. They are
            kept from the forward pass on.
        gradient_bytes: Bytes of parameter gradients that each stage's backward leaves behind.
        predicted_bytes: Peak of a step by the schedule, as the stages' bytes foretell it.
        peak_bytes: The same as the allocator counted it in the trial steps; the prediction where it cannot be asked.
        standing_bytes: The part of it that is there before and after a step, the optimizer's state included.
        step_bytes: The most that the allocator gave in a step since; 0 if none has shown.
        seconds: Time of that step's forward and backward pass, the median of the trial steps.
        plain_bytes: Predicted peak of a step that keeps everything.
        plain_seconds: Predicted time of its passes: by the stages' seconds, in proportion to `seconds`.
        offload: The place where stages may offload to, None for none.
        bandwidth: Its measured speed.
        offload_slots: Bytes at that place, by number of the stage whose saved set they are; of stage k's input at ~k.
        operations: The schedule's operations with the times of offload copies, as the runner has them.
    """

    crossing_bytes = standing_bytes = step_bytes = 0  # of a plan that was saved before it had them, too

    def __init__(
        self,
        sizes: Sequence[StageBytes],
        times: Sequence[StageSeconds],
        chain: Chain,
        schedule: Schedule,
        around: StepOverhead,
        memory_budget: int,
        fixed_bytes: int,
        crossing_bytes: int,
        slots: int,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.stages = [stage.name for stage in chain.stages[:-1]]
        self.chain, self.schedule = chain, schedule
        self.measured_bytes, self.measured_seconds = list(sizes), list(times)
        self.gradient_bytes = list(around.gradients)
        self.memory_budget, self.fixed_bytes = memory_budget, fixed_bytes
        self.crossing_bytes, self.slots, self.around = crossing_bytes, slots, around
        self.bandwidth = bandwidth
        self.offload: str | None = None
        self.offload_slots: dict[int, int] = {}
        self.operations, peak = with_copies(
            schedule,
            around.during(schedule),
            None if isinstance(bandwidth, CodingSpeed) else [size.movable for size in sizes],
            memory_budget - fixed_bytes,
        )
        self.predicted_bytes = self.peak_bytes = fixed_bytes + peak
        self.seconds = schedule.seconds
        self.plain_bytes = fixed_bytes + around.peak(keep_all(chain))
        self.plain_seconds = chain.plain_seconds
        self.runner: ChainRunner | None = None

    def check(self) -> PlanCheck:
        """Compare the steps that the model has taken by this plan with its budget.

        The allocator's figures decide, of each step from the forward pass to the end of the backward pass. On a CUDA
        device these are torch's statistics: a step shows if it raises their peak, and cuBLAS's workspaces count only
        where the step makes them. On a CPU every step shows, but those within a recording. The next call after a step
        above the budget makes a new plan, or is an error where auto_checkpoint() was called with strict=True.

        Returns:
            The budget, the prediction, and the most bytes measured.

        Examples:
            >>> print(model.plan.check())
            predicted 5.81 GiB, 5.83 GiB in trial steps, 5.83 GiB in its steps: within the budget of 6 GiB
        """
        return PlanCheck(self.memory_budget, self.predicted_bytes, self.peak_bytes, self.step_bytes or None)

    def took(self, nbytes: int) -> None:
        """Note the peak of a step by this plan.

        Args:
            nbytes: The most that the allocator gave from its forward pass to the end of its backward pass.
        """
        self.step_bytes = max(self.step_bytes, nbytes)

    def ran_in(self, seconds: float) -> None:
        """Take the seconds of the plan's own steps for its prediction; those of the plain step change in proportion.

        Args:
            seconds: Of a forward and backward pass by the plan; 0 where none was timed.
        """
        if seconds and self.seconds:
            self.plain_seconds *= seconds / self.seconds
            self.seconds = seconds

    def least_seconds(self) -> float:
        """Return a bound: no schedule of these stages within the budget takes less, by the stages' seconds.

        What skips stages is taken for nothing, as if it could be made again in no time. For a chain, in which nothing
        does, the plan's schedule is the bound.

        Returns:
            Seconds, to be compared with `schedule.seconds`.

        Examples:
            >>> plan.schedule.seconds / plan.least_seconds() - 1
            0.021
        """
        if not self.crossing_bytes:
            return self.schedule.seconds
        room = self.memory_budget - self.fixed_bytes + self.crossing_bytes
        schedule, _ = fastest(self.chain, self.around, room, self.slots)
        return min(self.schedule.seconds, schedule.seconds) if schedule else self.schedule.seconds

    def _runs(self) -> Counter[int]:
        return Counter(k for op, k, *_ in self.schedule.ops if op in RUNS)

    @property
    def offloaded(self) -> set[int]:
        """Numbers of the stages whose saved set is offloaded at some time: one that is wanted at once stays."""
        pairs = itertools.pairwise(self.schedule.ops)
        return {
            k for (op, k, *way), then in pairs if (op, way) == ("fall", [OPTION]) and then[:2] != ("bwd", k)
        }

    @property
    def inputs_offloaded(self) -> set[int]:
        """Numbers of the stages whose input is offloaded at some time."""
        return {k for op, k, *_ in self.schedule.ops if op == "put_input"}

    @property
    def keeps_all(self) -> bool:
        """Return whether the budget needs no recomputation and no offload: the plain run fits."""
        return max(self._runs().values()) == 1 and not self.offloaded | self.inputs_offloaded

    def _first_keeps(self) -> dict[int, str]:
        """Return the tensors' treatment in each stage's first run: kept, dropped or offloaded."""
        first: dict[int, str] = {}
        elsewhere = _CODED if isinstance(self.bandwidth, CodingSpeed) else _AWAY
        for (op, k, *option), following in itertools.pairwise([*self.schedule.ops, ("", -1)]):
            if op in RUNS:
                goes = option == [OPTION] or (op == "fck" and following[0] == "put_input")
                first.setdefault(k, RUNS[op] + (elsewhere if goes else ""))
        return first

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of str() as JSON-able values, in bytes and seconds."""
        runs, first = self._runs(), self._first_keeps()
        measured = zip([*self.stages, REST], self.measured_bytes, self.measured_seconds, strict=True)
        return {
            "memory_budget": self.memory_budget,
            "fixed_bytes": self.fixed_bytes,
            "crossing_bytes": self.crossing_bytes,
            "gradient_bytes": sum(self.gradient_bytes),
            "predicted_bytes": self.predicted_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "plain_bytes": self.plain_bytes,
            "plain_seconds": self.plain_seconds,
            "stages": [
                {
                    "name": name,
                    "saved_bytes": sizes.saved,
                    "output_bytes": sizes.output,
                    "forward_seconds": time.full_forward,
                    "backward_seconds": time.backward,
                    "runs": runs[k],
                    "keeps": first[k],
                }
                for k, (name, sizes, time) in enumerate(measured)
            ],
        }

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *self._table().lines(indent="")])

    def _repr_html_(self) -> str:
        return paragraphs(self._summary()) + self._table().html()

    def _summary(self) -> list[str]:
        size = _C.format_size
        return [
            f"{len(self.stages)} stages within {size(self.memory_budget)}: {size(self.peak_bytes)} and "
            f"{self.seconds * 1e3:.1f} ms a step; with everything kept {size(self.plain_bytes)} and "
            f"{self.plain_seconds * 1e3:.1f} ms",
            f"{size(self.fixed_bytes)} of it is live regardless of how the stages are run; the backward pass makes "
            f"{size(sum(self.gradient_bytes))} of gradients",
            *self._of_crossing(),
            *self._of_offload(),
        ]

    def _table(self) -> ResultTable:
        runs, size, first = self._runs(), _C.format_size, self._first_keeps()
        measured = zip([*self.stages, REST], self.measured_bytes, self.measured_seconds, strict=True)
        rows = [
            (
                name,
                size(sizes.saved),
                size(sizes.output),
                f"{time.full_forward * 1e3:.2f} ms",
                f"{time.backward * 1e3:.2f} ms",
                str(runs[k]),
                first[k],
            )
            for k, (name, sizes, time) in enumerate(measured)
        ]
        return ResultTable(rows, _HEADS, left=(0, 6))

    def _of_crossing(self) -> list[str]:
        if not self.crossing_bytes:
            return []
        gap = self.schedule.seconds / self.least_seconds() - 1 if self.schedule.seconds else 0.0
        return [
            f"{_C.format_size(self.crossing_bytes)} skip stages and are kept throughout: if they took nothing, a step "
            f"would be {gap:.1%} faster at best"
        ]

    def _of_offload(self) -> list[str]:
        if self.offload is None or self.bandwidth is None:
            return []
        size, rates = _C.format_size, [_C.format_size(int(one)) for one in self.bandwidth]
        if isinstance(self.bandwidth, CodingSpeed):
            nbytes, codes = (
                sum(getattr(self.measured_bytes[k], name) for k in self.offloaded)
                for name in ("codable", "codes")
            )
            return [
                f"{size(nbytes)} of what {len(self.offloaded)} stages save is kept in 8 bits, as {size(codes)}, of "
                f"which {rates[0]} are coded and {rates[1]} decoded in a second; gradients change by that"
            ]
        where = "pinned memory of the host" if self.offload == "cpu" else self.offload
        said = []
        if sets := self.offloaded:
            nbytes = sum(self.measured_bytes[k].movable for k in sets)
            said.append(f"{size(nbytes)} of what {len(sets)} stages save")
        if inputs := self.inputs_offloaded:
            nbytes = sum(self.measured_bytes[k - 1].output for k in inputs)
            said.append(f"{size(nbytes)} of {len(inputs)} stages' inputs")
        return [
            f"{' and '.join(said) or 'nothing'} is offloaded to {where}, at {rates[0]} a second and {rates[1]} back"
        ]
