"""Optimal schedules of recomputation and offload for a chain of stages under a memory budget.

They are found by dynamic programming in C. Neither torch nor a GPU is needed.

Example:
    >>> stages = [memopt.chain.Stage(saved_bytes, output_bytes, forward_seconds, backward_seconds), ...]
    >>> schedule = memopt.chain.solve(memopt.chain.Chain(stages, input_bytes), "4GiB")
    >>> print(schedule.picture())
    >>> schedule.seconds, schedule.peak_bytes, schedule.ops

The last stage of a chain is the loss. a[i] is the input of stage i; a[0] is always there, held by the caller and never
counted. s[i] is the saved set of stage i: the tensors that its backward needs, its output a[i+1] included. The state of
a step is a set of inputs, a set of saved sets and one gradient, at first the seed's.

Operations:
    fnone i        needs a[i] or s[i-1]; makes a[i+1]; frees a[i]
    fck i          the same, and keeps a[i]
    fall i         the same, and makes s[i] in place of a[i+1]; takes remake_seconds right before bwd i
    bwd i          needs s[i], the gradient of a[i+1], and a[i] or s[i-1]; makes the gradient of a[i]; frees the others
    drop_input i   frees a[i]
    drop_saved i   frees s[i]
    put_input i    needs a[i] other than in s[i-1]; frees it, and has it off the device; takes put_input_seconds
    get_input i    needs a[i] off the device; makes it again; takes get_input_seconds

fnone, fck and fall need forward_overhead_bytes more while they run, bwd backward_overhead_bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memopt import _C
from memopt._runtime import arguments
from memopt._runtime.lazy_names import lazy_names
from memopt._runtime.results import Result

__all__ = [
    "LEVELS",
    "Chain",
    "InfeasibleBudget",
    "Moment",
    "Op",
    "Option",
    "Schedule",
    "Stage",
    "Table",
    "solve",
]

_, __dir__ = lazy_names(globals(), {})

Op = tuple[str, int] | tuple[str, int, str]
"""("fck", stage), or ("fall", stage, option) where not the stage's own way is taken."""

LEVELS = ("persistent", "default", "full")
_WITH_OPTION = ("fall", "bwd")


class InfeasibleBudget(ValueError):
    """No schedule of the chain fits the budget.

    Attributes:
        least_budget: The least memory_budget, in bytes, for which the same call finds a schedule.
    """

    def __init__(self, message: str, least_budget: int = 0) -> None:
        super().__init__(message)
        self.least_budget = least_budget


@dataclass(frozen=True)
class Option:
    """An alternative for a stage's full forward run: a saved set of another size, at another cost.

    Attributes:
        name: Name of the option, as operations give it.
        saved_bytes: Bytes of the saved set, the stage's output included.
        forward_seconds: Time of the forward run.
        backward_seconds: Time of the backward run.
        forward_overhead_bytes: Bytes that the forward run needs besides, while it runs.
        backward_overhead_bytes: Bytes that the backward run needs besides, while it runs.
        remake_seconds: Time of a forward run right before the stage's own backward, which may stop early; None for
            forward_seconds.
    """

    name: str
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    remake_seconds: float | None = None

    def _native(self) -> tuple[int, int, int, float, float, float]:
        remake = self.forward_seconds if self.remake_seconds is None else self.remake_seconds
        return (
            arguments.size(self.saved_bytes, "saved_bytes"),
            arguments.size(self.forward_overhead_bytes, "forward_overhead_bytes"),
            arguments.size(self.backward_overhead_bytes, "backward_overhead_bytes"),
            float(self.forward_seconds),
            float(self.backward_seconds),
            float(remake),
        )


@dataclass(frozen=True)
class Stage:
    """One stage of a chain, with its measured costs.

    A stage can always be kept in full, or run without keeping anything and be run again later; further choices are in
    options.

    Attributes:
        saved_bytes: Bytes of the saved set, the stage's output included.
        output_bytes: Bytes of the output.
        forward_seconds: Time of the forward run.
        backward_seconds: Time of the backward run.
        forward_overhead_bytes: Bytes that the forward run needs besides, while it runs.
        backward_overhead_bytes: Bytes that the backward run needs besides, while it runs.
        remake_seconds: Time of a forward run right before the stage's own backward, which may stop early; None for
            forward_seconds. It cannot stop early where its output is needed: leave it None for the loss.
        input_grad_bytes: Bytes of the gradient of the input; None for as many as the input's.
        options: Alternatives for the full forward run.
        name: Name of the stage, for tables and errors.
        put_input_seconds: Time by which a step gets longer where the stage's input is put off the device, once the
            stage has run, until the stage is to run again or its backward comes; None where the input stays.
        get_input_seconds: Time by which it gets longer as the input comes back.
    """

    saved_bytes: int
    output_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    remake_seconds: float | None = None
    input_grad_bytes: int | None = None
    options: tuple[Option, ...] = ()
    name: str = ""
    put_input_seconds: float | None = None
    get_input_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        names = [option.name for option in self.options]
        if "" in names or len({*names}) < len(names):
            raise ValueError(f"options={names}: each needs a unique name")

    def with_offload(
        self, nbytes: int | str, bandwidth: float, *, back: float | None = None, name: str = "offload"
    ) -> Stage:
        """Return this stage with an option that offloads part of its saved set.

        The bytes leave the device while the stage runs and come back while its backward runs; they are on the device
        during both.

        Args:
            nbytes: Bytes that leave the device ("1GiB" too).
            bandwidth: Bytes per second from the device.
            back: Bytes per second to the device; None for bandwidth.
            name: Name of the option.

        Raises:
            ValueError: A bandwidth is not positive, or nbytes is more than the stage saves besides its output.
        """
        size = self._part(nbytes)
        if not (bandwidth > 0 and (back is None or back > 0)):
            raise ValueError(f"bandwidth={bandwidth}, back={back}: a bandwidth must be more than 0")
        forward = max(self.forward_seconds, size / bandwidth)
        return self._with(
            Option(
                name,
                self.saved_bytes - size,
                forward,
                max(self.backward_seconds, size / (back or bandwidth)),
                self.forward_overhead_bytes + size,
                self.backward_overhead_bytes + size,
                max(forward, self.remake_seconds or 0.0),
            )
        )

    def with_selective(self, nbytes: int | str, seconds: float, *, name: str = "selective") -> Stage:
        """Return this stage with an option that recomputes part of its saved set in its backward.

        Args:
            nbytes: Bytes that are recomputed ("1GiB" too).
            seconds: Time that recomputing them takes.
            name: Name of the option.

        Raises:
            ValueError: nbytes is more than the stage saves besides its output.
        """
        size = self._part(nbytes)
        return self._with(
            Option(
                name,
                self.saved_bytes - size,
                self.forward_seconds,
                self.backward_seconds + seconds,
                self.forward_overhead_bytes,
                self.backward_overhead_bytes + size,
                self.remake_seconds,
            )
        )

    def _part(self, nbytes: int | str) -> int:
        size = arguments.size(nbytes, "nbytes")
        if size > self.saved_bytes - self.output_bytes:
            raise ValueError(
                f"nbytes={size}: at most saved_bytes - output_bytes = {self.saved_bytes - self.output_bytes} can be "
                "offloaded"
            )
        return size

    def _with(self, option: Option) -> Stage:
        return replace(self, options=(*self.options, option))

    def _own(self) -> Option:
        return Option(
            "",
            self.saved_bytes,
            self.forward_seconds,
            self.backward_seconds,
            self.forward_overhead_bytes,
            self.backward_overhead_bytes,
            self.remake_seconds,
        )

    def _index(self, option: str) -> int:
        names = ["", *(o.name for o in self.options)]
        if option not in names:
            raise ValueError(f"there is no option {option!r} among {names[1:]}")
        return names.index(option)


@dataclass(frozen=True)
class Chain:
    """Stages in order, the last of which is the loss.

    Args:
        stages: The stages.
        input_bytes: Bytes of the chain's input.
        output_grad_bytes: Bytes of the seed of the backward; None for as many as the last stage's output.

    Raises:
        ValueError: A figure makes no sense; the message names the stage.
    """

    stages: tuple[Stage, ...]
    input_bytes: int
    output_grad_bytes: int | None = None
    _native: tuple[tuple[_C._ChainStage, ...], int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        given = arguments.size(self.input_bytes, "input_bytes")
        native: list[_C._ChainStage] = []
        for i, stage in enumerate(self.stages):
            try:
                output = arguments.size(stage.output_bytes, "output_bytes")
                grad = (
                    given
                    if stage.input_grad_bytes is None
                    else arguments.size(stage.input_grad_bytes, "input_grad_bytes")
                )
                options = tuple(option._native() for option in (stage._own(), *stage.options))
            except (TypeError, ValueError) as error:
                raise type(error)(f"stage {i}: {error}") from None
            put = math.inf if stage.put_input_seconds is None else float(stage.put_input_seconds)
            native.append((output, grad, put, float(stage.get_input_seconds), options))
            given = output
        if self.output_grad_bytes is not None:
            given = arguments.size(self.output_grad_bytes, "output_grad_bytes")
        object.__setattr__(self, "_native", (tuple(native), self.input_bytes, given))
        _C.chain_check(*self._native)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step that keeps everything."""
        return sum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)

    def keep_all(self) -> Schedule:
        """Return the schedule of a plain step, which keeps everything."""
        stages = range(len(self.stages))
        return Schedule(self, [("fall", i) for i in stages] + [("bwd", i) for i in reversed(stages)])


@dataclass(frozen=True)
class Moment:
    """One operation of a schedule, as replayed.

    Attributes:
        seconds: Time of the operation.
        during_bytes: Bytes that are allocated while it runs.
        after_bytes: Bytes that are allocated after it.
    """

    seconds: float
    during_bytes: int
    after_bytes: int


class Schedule(Result):
    """The operations of a training step over a chain, in order.

    solve() and Table make schedules. A schedule is replayed when it is made.

    Args:
        chain: The chain.
        ops: Operations, such as ("fck", stage), or ("fall", stage, option) for an option of the stage.
        memory_budget: Budget in bytes, for validate().
        curve: (memory_budget, seconds) of smaller budgets, for the property of that name.

    Raises:
        ValueError: An operation cannot be done; the message says which, and why.

    Attributes:
        seconds: Time of the step.
        peak_bytes: Most bytes allocated at once, everything counted but the chain's own input.
    """

    def __init__(
        self,
        chain: Chain,
        ops: Iterable[Op],
        *,
        memory_budget: int | None = None,
        curve: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.chain = chain
        self.ops: tuple[Op, ...] = tuple(ops)
        self.memory_budget = memory_budget
        self._curve = tuple(curve)
        self.seconds, self.peak_bytes, self._peak_at, moments = self._replay()
        self.moments = tuple(Moment(*moment) for moment in moments)

    def _replay(self) -> tuple[float, int, int, list[tuple[float, int, int]]]:
        native: list[_C._ChainOp] = []
        for at, (op, stage, *option) in enumerate(self.ops):
            index = 0
            if option:
                if op not in _WITH_OPTION:
                    raise ValueError(
                        f"operation {at}, {op} {stage}: only {' and '.join(_WITH_OPTION)} have options"
                    )
                try:
                    index = self.chain.stages[stage]._index(option[0])
                except (IndexError, ValueError) as error:
                    raise ValueError(f"operation {at}, {op} {stage}: {error}") from None
            native.append((op, stage, index))
        return _C.chain_replay(*self.chain._native, native)

    def validate(self, memory_budget: int | str | None = None) -> None:
        """Replay the schedule again and check its peak.

        Args:
            memory_budget: Bytes, or "8GiB"; None for the schedule's own budget.

        Raises:
            ValueError: An operation cannot be done, or the peak is above the budget.
        """
        budget = (
            self.memory_budget if memory_budget is None else arguments.size(memory_budget, "memory_budget")
        )
        _, peak, at, _ = self._replay()
        if budget is not None and peak > budget:
            op, stage, *_ = self.ops[at]
            raise ValueError(
                f"peak of {peak} bytes at operation {at}, {op} {stage}: memory_budget is {budget}"
            )

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Seconds by budget: pairs (memory_budget, seconds), from the least feasible budget to this schedule's.

        A step with that budget takes those seconds or fewer.

        Raises:
            ValueError: The schedule was made by hand, not by solve() or a Table.
        """
        if not self._curve:
            raise ValueError("this schedule was not made by solve() or a Table: only theirs have a curve")
        return self._curve

    def table(self) -> str:
        """Return the operations as text, one line for each."""
        wide = max(len(_words(op)) for op in self.ops)
        lines = [f"{'operation':{wide}}  {'seconds':>10}  {'during':>9}  {'after':>9}"]
        for at, (op, moment) in enumerate(zip(self.ops, self.moments, strict=True)):
            during, after = _C.format_size(moment.during_bytes), _C.format_size(moment.after_bytes)
            peak = "  peak" if at == self._peak_at else ""
            lines.append(f"{_words(op):{wide}}  {moment.seconds:10.6f}  {during:>9}  {after:>9}{peak}")
        return "\n".join([*lines, self._sum()])

    def picture(self, width: int = 100) -> str:
        """Draw memory and stages over the operations as text.

        Args:
            width: Columns of the drawing, the stages' names not counted.

        Returns:
            The drawing, a row for each stage, in these marks:
                n c F B x: the stage runs fnone, fck, fall, bwd, a drop
                < >: its input is put off the device, got back
                =: its saved set is there
                -: its input is there
        """
        names = [stage.name or str(i) for i, stage in enumerate(self.chain.stages)]
        wide = max(map(len, [*names, "memory"]))
        columns = min(width, len(self.ops))
        rows = [[" "] * columns for _ in names]
        memory = [0] * columns
        for at, marks in enumerate(self._marks()):
            column = at * columns // len(self.ops)
            memory[column] = max(memory[column], self.moments[at].during_bytes)
            for row, mark in zip(rows, marks, strict=True):
                row[column] = max(row[column], mark, key=" -=x<>ncFB".index)
        top = max(self.memory_budget or 0, self.peak_bytes, 1)
        bars = "".join("▁▂▃▄▅▆▇█"[min(7, 8 * bytes_ // top)] for bytes_ in memory)
        lines = [f"{name:>{wide}} {''.join(row)}" for name, row in zip(names, rows, strict=True)]
        return "\n".join([f"{'memory':>{wide}} {bars}", *lines, self._sum()])

    def _marks(self) -> Iterable[list[str]]:
        """At each operation a mark for each stage."""
        stages = len(self.chain.stages)
        inputs, saved = [False] * (stages + 1), [False] * stages
        letters = {"fnone": "n", "fck": "c", "fall": "F", "bwd": "B", "drop_input": "x", "drop_saved": "x"}
        letters |= {"put_input": "<", "get_input": ">"}
        for op, stage, *_ in self.ops:
            marks = ["=" if s else "-" if i else " " for i, s in zip(inputs, saved, strict=False)]
            if stage < stages:
                marks[stage] = letters[op]
            yield marks
            if op in ("fnone", "fck"):
                inputs[stage + 1] = True
            if op in ("fnone", "bwd", "drop_input", "put_input"):
                inputs[stage] = False
            if op == "get_input":
                inputs[stage] = True
            if op in ("fall", "bwd", "drop_saved"):
                saved[stage] = op == "fall"

    def _sum(self) -> str:
        plain = self.chain.plain_seconds
        more = f" ({self.seconds / plain - 1:+.1%} on a plain step)" if plain else ""
        budget = "" if self.memory_budget is None else f" of {_C.format_size(self.memory_budget)}"
        return f"{self.seconds:.6f} s{more}, peak {_C.format_size(self.peak_bytes)}{budget}, {len(self.ops)} operations"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values: seconds, bytes, and the operations."""
        return {
            "seconds": self.seconds,
            "plain_seconds": self.chain.plain_seconds,
            "peak_bytes": self.peak_bytes,
            "memory_budget": self.memory_budget,
            "operations": [list(op) for op in self.ops],
        }

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Schedule of {len(self.chain.stages)} stages: {self._sum()}>"


def _words(op: Op) -> str:
    return " ".join(map(str, op))


class Table:
    """Schedules for every budget up to memory_budget, from one run of the solver; the arguments are those of solve().

    Attributes:
        least_budget: The least feasible budget in bytes, which may be more than memory_budget.
    """

    def __init__(
        self, chain: Chain, memory_budget: int | str, slots: int = 500, *, level: str = "default"
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level={level!r} is not one of {', '.join(LEVELS)}")
        if not isinstance(chain, Chain):
            raise TypeError(f"chain is {arguments.shown(chain)}: give a memopt.chain.Chain of Stages")
        self.chain = chain
        self.memory_budget = arguments.size(memory_budget, "memory_budget")
        self._table = _C.ChainTable(*chain._native, self.memory_budget, slots, LEVELS.index(level))
        self.least_budget = self._table.least_budget

    def curve(self) -> list[tuple[int, float]]:
        """Return pairs (memory_budget, seconds), from the least feasible budget to the table's own.

        A step with that budget takes those seconds or fewer. Empty if the table's own budget is not feasible.
        """
        return self._table.curve()

    def schedule(self, memory_budget: int | str | None = None) -> Schedule:
        """Return the fastest schedule for a budget.

        Args:
            memory_budget: Bytes, or "8GiB", up to the table's own budget; None for that one.

        Raises:
            InfeasibleBudget: No schedule fits.
            ValueError: The budget is above the table's own.
        """
        budget = (
            self.memory_budget if memory_budget is None else arguments.size(memory_budget, "memory_budget")
        )
        if budget > self.memory_budget:
            raise ValueError(
                f"memory_budget={budget} exceeds the table's, {self.memory_budget}: make another table"
            )
        if budget < self.least_budget:
            least = self.least_budget
            raise InfeasibleBudget(
                f"no schedule of these {len(self.chain.stages)} stages fits memory_budget={budget} "
                f"({_C.format_size(budget)}): the least feasible is {least} ({_C.format_size(least)})",
                least,
            )
        names = [["", *(option.name for option in stage.options)] for stage in self.chain.stages]
        ops: list[Op] = [
            (op, stage, names[stage][option]) if option else (op, stage)
            for op, stage, option in self._table.schedule(budget)
        ]
        curve = [point for point in self.curve() if point[0] <= budget]
        return Schedule(self.chain, ops, memory_budget=budget, curve=curve)


def solve(chain: Chain, memory_budget: int | str, slots: int = 500, *, level: str = "default") -> Schedule:
    """Find the fastest schedule of the chain that fits the budget.

    Args:
        chain: The chain.
        memory_budget: Bytes, or "8GiB". Everything is counted but the chain's own input, which its caller holds.
        slots: Number of units that the budget is divided into. The solver's time and memory grow with it. Sizes are
            rounded up to units, unless they have a common divisor that goes into the budget at most `slots` times.
        level: "persistent" is the classical optimum, in which a kept tensor stays until its backward; "default" also
            drops inputs and recomputes them late; "full" searches more such schedules, and is for short chains and the
            smallest budgets. Apart from rounding, no level finds a slower schedule than the one before it.

    Returns:
        The schedule.

    Raises:
        InfeasibleBudget: No schedule fits; its least_budget is the least budget that does.
        ValueError: An argument makes no sense.
    """
    return Table(chain, memory_budget, slots, level=level).schedule()
