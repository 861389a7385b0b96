"""What auto_checkpoint found, measured and decided, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt.chain import Chain, Op, Option, Schedule, Stage, Table
from memopt.checkpointing.chain_offload import OPTION
from memopt.checkpointing.copy_times import with_copies

if TYPE_CHECKING:
    from memopt.checkpointing.bandwidth import Bandwidth
    from memopt.checkpointing.chain_runner import ChainRunner
    from memopt.checkpointing.stage_costs import StageBytes, StageSeconds

REST = "(what follows)"
SAVING = "saving"  # the option of a stage to save all
RUNS = {"fall": "all", "fck": "its input", "fnone": "nothing"}
_AWAY = "all, offloaded"


class Around(NamedTuple):
    """What a step holds that the chain does not know of, or does not as long as the chain says.

    gradients: bytes that stage i's backward leaves, of its parameters; while it runs its overhead counts them.
    outputs: bytes of stage i's output, 0 where stage i itself saves it: they go with the backward of stage i + 1.
    remade: bytes that stage i makes, at the most, when it runs again right before its backward and ends early.
    result: bytes of what the model returns, which its caller may hold for long; of these last: in the last stage's
    output. external: gradients of arguments that skip stages, as (stage by whose backward it is made, stage by whose
    backward it is used, or -1, bytes)."""

    gradients: Sequence[int]
    outputs: Sequence[int]
    remade: Sequence[int]
    result: int
    last: int
    external: Sequence[tuple[int, int, int]] = ()

    def peak(self, schedule: Schedule) -> int:
        return max(self.during(schedule))

    def during(self, schedule: Schedule) -> list[int]:
        """Bytes at each operation."""
        rest = len(self.gradients) - 1  # what comes after the stages
        made = 0
        there: list[int] = []
        following = rest + 1  # its gradient is there
        saved: set[int] = set()
        ran: set[int] = set()
        for operation, moment, after in zip(
            schedule.ops, schedule.moments, [*schedule.ops[1:], ("", -1)], strict=True
        ):
            op, stage, *_ = operation
            now = moment.during_bytes + made
            if op == "fall" and stage in ran and after[:2] == ("bwd", stage):
                now -= max(0, in_full(schedule.chain, operation) - self.remade[stage])
            ran.add(stage)
            if following <= rest:
                # The caller's, but not twice while the last stage's saved set is there.
                now += self.result + (0 if rest - 1 in saved else self.last)
            if following < rest and following - 1 in saved:
                now -= self.outputs[following - 1]
            there.append(now)
            if op == "fall":
                saved.add(stage)
            elif op in ("bwd", "drop_saved"):
                saved.discard(stage)
            if op == "bwd":
                made += self.gradients[stage]
                made += sum(size for begin, _, size in self.external if begin == stage)
                made -= sum(size for _, end, size in self.external if end == stage)
                following = stage
        return there


def in_full(chain: Chain, operation: Op) -> int:
    """Bytes that the chain counts for a `fall`."""
    _, k, *name = operation
    stage = chain.stages[k]
    way = next((option for option in stage.options if name and option.name == name[0]), stage)
    return way.saved_bytes + way.forward_overhead_bytes


def without_clock(chain: Chain) -> Chain:
    """The chain with seconds that depend on its bytes alone: a stage takes as long as it saves much."""

    def unmeasured(way: Stage | Option) -> dict[str, Any]:
        seconds = float(way.saved_bytes)
        return {"forward_seconds": seconds, "backward_seconds": seconds, "remake_seconds": None}

    stages = []
    for stage in chain.stages:
        options = tuple(replace(option, **unmeasured(option)) for option in stage.options)
        stages.append(replace(stage, **unmeasured(stage), options=options))
    return replace(chain, stages=tuple(stages))


def fastest(chain: Chain, around: Around, memory_budget: int, slots: int) -> tuple[Schedule | None, int]:
    """The fastest schedule whose peak with what is around it is within the budget, and the least such peak that is
    known. Gradients come when most of what was saved is gone: to count them from the start would waste as much."""
    # Where the chain counts an output longer than it lives, or a forward that ends early in full, its peak is above the
    # true one.
    early = [max(0, in_full(chain, ("fall", k)) - size) for k, size in enumerate(around.remade)]
    table = Table(chain, max(memory_budget + max(*around.outputs, *early), 0), slots)
    for budget, _ in sorted(table.curve(), reverse=True):
        schedule = table.schedule(budget)
        peak = around.peak(schedule)
        if peak <= memory_budget:
            return schedule, peak
    least, peak = leanest(chain, around, slots)
    return (least if peak <= memory_budget else None), peak


def leanest(chain: Chain, around: Around, slots: int) -> tuple[Schedule, int]:
    """The schedule whose peak with what is around it is the least that is known, and that peak. It is the same another
    time, when the same stages are found to take other seconds: it depends neither on those nor on a budget."""
    unclocked = without_clock(chain)
    table = Table(unclocked, 2 * Table(unclocked, 0, slots).least_budget, slots)
    found = [Schedule(chain, table.schedule(budget).ops) for budget, _ in table.curve()]
    least = min(found, key=around.peak)
    return least, around.peak(least)


def keep_all(chain: Chain) -> Schedule:
    """The plain step, in which each stage saves all in the way that takes least."""
    ways = [
        ((k, SAVING) if any(option.name == SAVING for option in stage.options) else (k,))
        for k, stage in enumerate(chain.stages)
    ]
    return Schedule(chain, [("fall", *way) for way in ways] + [("bwd", *way) for way in reversed(ways)])


class Plan:
    """The plan of a checkpointed model, `model.plan`; str() explains it.

    stages: the modules' names, in the order in which they run, those together that are one stage. chain, schedule: as
    in memopt.chain; the last stage is what comes after them, the loss among it. measured_bytes, measured_seconds: of
    each. memory_budget: bytes, of all that lives in a forward and backward pass. fixed_bytes: of these what lives
    however the stages are run: parameters, buffers, the optimizer's state, the sample, what is saved around the stages
    and what they take besides each other's outputs. gradient_bytes: what each stage's backward leaves, of its
    parameters. peak_bytes, seconds: predicted for a step by the schedule; plain_bytes, plain_seconds: for one that
    keeps everything. offload, bandwidth: where stages may offload to, and its measured speed; offload_slots:
    the bytes there of each of the runner's stages that does; operations: the
    schedule's, with the times of such copies, as the runner has them."""

    def __init__(
        self,
        sizes: Sequence[StageBytes],
        times: Sequence[StageSeconds],
        chain: Chain,
        schedule: Schedule,
        around: Around,
        memory_budget: int,
        fixed_bytes: int,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.stages = [stage.name for stage in chain.stages[:-1]]
        self.chain, self.schedule = chain, schedule
        self.measured_bytes, self.measured_seconds = list(sizes), list(times)
        self.gradient_bytes = list(around.gradients)
        self.memory_budget, self.fixed_bytes = memory_budget, fixed_bytes
        self.bandwidth = bandwidth
        self.offload: str | None = None
        self.offload_slots: dict[int, int] = {}
        self.operations, peak = with_copies(
            schedule,
            around.during(schedule),
            [size.movable for size in sizes],
            memory_budget - fixed_bytes,
            beside=bandwidth is not None and bandwidth.beside,
        )
        self.peak_bytes = fixed_bytes + peak
        self.seconds = schedule.seconds
        self.plain_bytes = fixed_bytes + around.peak(keep_all(chain))
        self.plain_seconds = chain.plain_seconds
        self.runner: ChainRunner | None = None

    def _runs(self) -> Counter[int]:
        return Counter(k for op, k, *_ in self.schedule.ops if op in RUNS)

    @property
    def offloaded(self) -> set[int]:
        """Stages whose saved set is kept elsewhere at some time."""
        return {k for op, k, *option in self.schedule.ops if op == "fall" and option == [OPTION]}

    @property
    def keeps_all(self) -> bool:
        """Whether the budget asks for nothing: the plain run is within it."""
        return max(self._runs().values()) == 1 and not self.offloaded

    def _first_keeps(self) -> dict[int, str]:
        """What each stage keeps when it first runs."""
        first: dict[int, str] = {}
        for op, k, *option in self.schedule.ops:
            if op in RUNS:
                first.setdefault(k, _AWAY if option == [OPTION] else RUNS[op])
        return first

    def as_dict(self) -> dict[str, Any]:
        """The figures of str(), JSON-able; bytes and seconds."""
        runs, first = self._runs(), self._first_keeps()
        measured = zip([*self.stages, REST], self.measured_bytes, self.measured_seconds, strict=True)
        return {
            "memory_budget": self.memory_budget,
            "fixed_bytes": self.fixed_bytes,
            "gradient_bytes": sum(self.gradient_bytes),
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
        runs, size, first = self._runs(), _C.format_size, self._first_keeps()
        names = [*self.stages, REST]
        width = max(map(len, [*names, "stage"]))
        lines = [
            f"{len(self.stages)} stages within {size(self.memory_budget)}: {size(self.peak_bytes)} and "
            f"{self.seconds * 1e3:.1f} ms a step; with everything kept {size(self.plain_bytes)} and "
            f"{self.plain_seconds * 1e3:.1f} ms",
            f"{size(self.fixed_bytes)} of it lives however the stages are run; the backward pass makes "
            f"{size(sum(self.gradient_bytes))} of gradients",
            *self._of_offload(),
            f"{'stage':<{width}}  {'saves':>10}  {'output':>10}  {'forward':>10}  {'backward':>10}  "
            "runs  at first keeps",
        ]
        for k, (name, sizes, time) in enumerate(
            zip(names, self.measured_bytes, self.measured_seconds, strict=True)
        ):
            lines.append(
                f"{name:<{width}}  {size(sizes.saved):>10}  {size(sizes.output):>10}  "
                f"{time.full_forward * 1e3:>7.2f} ms  {time.backward * 1e3:>7.2f} ms  {runs[k]:>4}  {first[k]}"
            )
        return "\n".join(lines)

    def _of_offload(self) -> list[str]:
        if self.offload is None or self.bandwidth is None:
            return []
        size = _C.format_size
        nbytes = sum(self.measured_bytes[k].movable for k in self.offloaded)
        where = "pinned memory of the host" if self.offload == "cpu" else self.offload
        return [
            f"{size(nbytes)} of what {len(self.offloaded)} stages save is offloaded to {where}, at "
            f"{size(int(self.bandwidth.out))} a second and {size(int(self.bandwidth.back))} back"
        ]
