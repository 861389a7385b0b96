"""A recording: which blocks of a device's memory lived when, who asked for them, and what they were for.

Everything that shows memory reads this: the tables of a profile, the report page, the comparison of two runs, the
answer of an estimate. Where it comes from (torch's history, memopt's trace, operations on a CPU) its `source` says.

An *event* is one birth or death of a block, numbered from 0 in the order they happened; a block that was there before
the recording began was born at -1, one that is there at its end died at `events`. Columns are int64 tensors on the CPU,
so that a million blocks are one operation, not a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

# What a block is for. "other": what no walk over modules, optimizers and graphs has claimed, such as a workspace.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS, OTHER = range(len(CATEGORIES))

# Bytes that torch gives cuBLAS to work in, for ever: on compute capability 9 and later, and before.
WORKSPACES = (32 << 20, 8320 << 10)

COLUMNS = ("born", "died", "address", "size", "stream", "stack", "module", "category")


class Frame(NamedTuple):
    """A line that was running when a block was asked for."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]  # the innermost first


class Mark(NamedTuple):
    """Something of the program's own at an event: "step" after an optimizer's step, "oom" where a request failed."""

    event: int
    kind: str
    text: str = ""


class Line(NamedTuple):
    """One row of by_line() and by_module(): what of the memory at some event belongs to a line or a module."""

    name: str  # "train.py:41", or a module's path; "" where it is not known
    bytes: int
    blocks: int
    category: str  # the one that most of the bytes are of
    text: str = ""  # of a line, the source's
    by_category: Mapping[str, int] = MappingProxyType({})  # bytes; they add up to `bytes`


@dataclass
class Recording:
    """One device's. `device` is "cuda:0" or "cpu"; `source` says what was watched, and whether it was simulated;
    `capacity` is the device's bytes, or what the process was allowed of them, None where there is no limit.

    stacks[0] is () and modules[0] is "": not known. `times_us` has one entry an event, by a clock of the process.
    `reserved_events`, `reserved_bytes`: what the allocator held from that event on. `facts`: JSON-able, about the run:
    versions, command line, figures that are not in the columns."""

    device: str
    source: str
    columns: dict[str, torch.Tensor]
    times_us: torch.Tensor
    stacks: list[Stack] = field(default_factory=lambda: [()])
    modules: list[str] = field(default_factory=lambda: [""])
    marks: list[Mark] = field(default_factory=list)
    reserved_events: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    reserved_bytes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    capacity: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(self.columns.get(name, ())) for name in COLUMNS}
        if set(self.columns) != set(COLUMNS) or len(set(lengths.values())) != 1:
            raise ValueError(f"a recording has the columns {', '.join(COLUMNS)}, of one length: {lengths}")
        for name, most in (
            ("stack", len(self.stacks)),
            ("module", len(self.modules)),
            ("category", len(CATEGORIES)),
        ):
            column = self.columns[name]
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < most:
                raise ValueError(
                    f"column {name!r} refers to what there is not: it has to be within 0 … {most - 1}"
                )

        born, died = self.columns["born"], self.columns["died"]
        if len(born) and not (
            int(born.min()) >= -1 and int(died.max()) <= self.events and bool((born < died).all())
        ):
            raise ValueError(
                f"a block is born at an event or at -1, and dies later, at {self.events} at the latest"
            )

    @property
    def events(self) -> int:
        return len(self.times_us)

    @property
    def blocks(self) -> int:
        return len(self.columns["size"])

    def since(self, event: int) -> Recording:
        """What came after this event: blocks that lived then were there before."""
        if event < 0:
            return self
        cut = min(event, self.events - 1) + 1
        lived = self.columns["died"] >= cut
        columns = {name: column[lived] for name, column in self.columns.items()}
        columns["born"] = (columns["born"] - cut).clamp(min=-1)
        columns["died"] = columns["died"] - cut
        before = (self.reserved_events < cut).nonzero().flatten()[-1:]
        after = (self.reserved_events >= cut).nonzero().flatten()
        chosen = torch.cat((before, after))
        return replace(
            self,
            columns=columns,
            times_us=self.times_us[cut:],
            marks=[mark._replace(event=mark.event - cut) for mark in self.marks if mark.event >= cut],
            reserved_events=(self.reserved_events[chosen] - cut).clamp(min=-1),
            reserved_bytes=self.reserved_bytes[chosen],
        )

    # ---- what lived when ----------------------------------------------------------------------------------------

    def live_bytes(self, category: int | None = None) -> torch.Tensor:
        """[events + 1]: bytes that lived before the first event, and after each; of one category or of all."""
        born, died, size = (self.columns[name] for name in ("born", "died", "size"))
        if category is not None:
            chosen = self.columns["category"] == category
            born, died, size = born[chosen], died[chosen], size[chosen]
        change = torch.zeros(self.events + 2, dtype=torch.int64)
        change.index_add_(0, born + 1, size)
        change.index_add_(0, died + 1, -size)
        return change[: self.events + 1].cumsum(0)

    def peak(self) -> tuple[int, int]:
        """The most bytes that lived at once, and the event after which they did first: -1 for before the first."""
        live = self.live_bytes()
        at = int(live.argmax())
        return int(live[at]), at - 1

    def live_at(self, event: int) -> torch.Tensor:
        """Indices of the blocks that live after this event."""
        return ((self.columns["born"] <= event) & (self.columns["died"] > event)).nonzero().flatten()

    # ---- whose it was -------------------------------------------------------------------------------------------

    def by_category(self, event: int | None = None) -> dict[str, int]:
        """Bytes of each category after an event, by default at the peak. They add up to all that lived."""
        sums = self._sums("category", len(CATEGORIES), event)
        return dict(zip(CATEGORIES, sums.tolist(), strict=True))

    def _sums(self, column: str, count: int, event: int | None) -> torch.Tensor:
        live = self.live_at(self.peak()[1] if event is None else event)
        sums = torch.zeros(count, dtype=torch.int64)
        return sums.index_add_(0, self.columns[column][live], self.columns["size"][live])

    def rows(self, group: torch.Tensor, names: Sequence[str], event: int | None = None) -> list[Line]:
        """What lived after an event, at the peak by default, grouped: `group` has one index into `names` a block. The
        largest first; groups without bytes are left out, and so is nothing else."""
        live = self.live_at(self.peak()[1] if event is None else event)
        size, category = self.columns["size"][live], self.columns["category"][live]
        table = torch.zeros(len(names), len(CATEGORIES), dtype=torch.int64)
        table.view(-1).index_add_(0, group[live] * len(CATEGORIES) + category, size)
        counts = torch.bincount(group[live], minlength=len(names))
        sums, most = table.sum(1), table.argmax(1)
        order = torch.argsort(sums, descending=True, stable=True).tolist()
        return [
            Line(
                names[n],
                int(sums[n]),
                int(counts[n]),
                CATEGORIES[int(most[n])],
                by_category={
                    name: part for name, part in zip(CATEGORIES, table[n].tolist(), strict=True) if part
                },
            )
            for n in order
            if counts[n]
        ]

    def by_line(self, event: int | None = None, named: Callable[[Frame], str] | None = None) -> list[Line]:
        """By the innermost line of the user's own that was running when the block was asked for: not torch's, not an
        installed package's. `named` says what a line is called, by default "train.py:41"; `text` is the line's, where
        its file is here."""
        from memopt.profiling.user_code import short_name, source_of, user_frame

        named = named or short_name

        lines: dict[Frame | None, int] = {None: 0}
        index = [
            lines.setdefault(found and found._replace(function=""), len(lines))
            for found in map(user_frame, self.stacks)
        ]
        frames = list(lines)
        rows = self.rows(
            torch.tensor(index)[self.columns["stack"]], [str(n) for n in range(len(frames))], event
        )
        return [
            row._replace(
                name=named(frame) if (frame := frames[int(row.name)]) else "",
                text=source_of(frame) if frame else "",
            )
            for row in rows
        ]

    def by_module(self, event: int | None = None) -> list[Line]:
        """By the module whose forward was running when the block was asked for."""
        return self.rows(self.columns["module"], self.modules, event)
