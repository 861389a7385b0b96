"""A recording of a device's memory: the lifetime, source line, module and category of each block.

Every view of memory reads it: the tables of a profile, the report page, the comparison of two runs, the result of an
estimate. Its `source` says where it comes from (torch's history, memopt's trace, operations on a CPU).

An *event* is one birth or death of a block, numbered from 0 in the order they happened. A block that existed before the
recording began was born at -1; one that is alive at its end died at `events`. Columns are int64 tensors on the CPU, so
that a million blocks take one operation, not a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

# What a block is for. "other": what no walk over modules, optimizers and graphs has attributed, such as a workspace.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS, OTHER = range(len(CATEGORIES))

# Bytes that torch gives cuBLAS to work in, for ever: on compute capability 9 and later, and before.
WORKSPACES = (32 << 20, 8320 << 10)

COLUMNS = ("born", "died", "address", "size", "stream", "stack", "module", "category")


class Frame(NamedTuple):
    """A source line that was running when a block was requested."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]  # the innermost first


class Mark(NamedTuple):
    """A mark of the program's at an event: "step" after an optimizer's step, "oom" where a request failed."""

    event: int
    kind: str
    text: str = ""


class Line(NamedTuple):
    """A row of by_line() and by_module(): the memory of one line or module at an event."""

    name: str  # "train.py:41", or a module's path; "" where it is not known
    bytes: int
    blocks: int
    category: str  # the one that most of the bytes are of
    text: str = ""  # of a line, the source's
    by_category: Mapping[str, int] = MappingProxyType({})  # bytes; they add up to `bytes`


@dataclass
class Recording:
    """A recording of one device.

    Attributes:
        device: "cuda:0" or "cpu".
        source: Text that says what was recorded, and whether it was simulated.
        columns: One int64 tensor for each property of the blocks.
        times_us: Microseconds at each event, by a clock of the process.
        stacks: Python stacks by number; stacks[0] is (), not known.
        modules: Module names by number; modules[0] is "", not known.
        marks: Steps and failed requests.
        reserved_events: Events at which the bytes held by the allocator changed.
        reserved_bytes: Bytes that the allocator held from each of those events on.
        capacity: Bytes of the device, or those that the process was allowed, None for no limit.
        facts: JSON-able facts about the run: versions, command line, figures that are not in the columns.
    """

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
                    f"column {name!r} has indices out of range: they must be within 0 … {most - 1}"
                )

        born, died = self.columns["born"], self.columns["died"]
        if len(born) and not (
            int(born.min()) >= -1 and int(died.max()) <= self.events and bool((born < died).all())
        ):
            raise ValueError(
                f"a block must be born at an event or at -1, and die later, at {self.events} at the latest"
            )

    @property
    def events(self) -> int:
        return len(self.times_us)

    @property
    def blocks(self) -> int:
        return len(self.columns["size"])

    def since(self, event: int) -> Recording:
        """Return the recording after an event; blocks that were alive then were there before it.

        Args:
            event: Number of the event.
        """
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
        """Return the live bytes over time.

        Args:
            category: Index into CATEGORIES; None for all.

        Returns:
            An int64 tensor of shape [events + 1]: bytes alive before the first event, and after each.
        """
        born, died, size = (self.columns[name] for name in ("born", "died", "size"))
        if category is not None:
            chosen = self.columns["category"] == category
            born, died, size = born[chosen], died[chosen], size[chosen]
        change = torch.zeros(self.events + 2, dtype=torch.int64)
        change.index_add_(0, born + 1, size)
        change.index_add_(0, died + 1, -size)
        return change[: self.events + 1].cumsum(0)

    def peak(self) -> tuple[int, int]:
        """Return the most bytes alive at once, and the first event after which they were (-1: before any event)."""
        live = self.live_bytes()
        at = int(live.argmax())
        return int(live[at]), at - 1

    def live_at(self, event: int) -> torch.Tensor:
        """Return the indices of the blocks that are alive after this event.

        Args:
            event: Number of the event; -1 for before the first.
        """
        return ((self.columns["born"] <= event) & (self.columns["died"] > event)).nonzero().flatten()

    # ---- whose it was -------------------------------------------------------------------------------------------

    def by_category(self, event: int | None = None) -> dict[str, int]:
        """Return the bytes of each category after an event; they add up to all live bytes.

        Args:
            event: Number of the event; by default that of the peak.
        """
        sums = self._sums("category", len(CATEGORIES), event)
        return dict(zip(CATEGORIES, sums.tolist(), strict=True))

    def _sums(self, column: str, count: int, event: int | None) -> torch.Tensor:
        live = self.live_at(self.peak()[1] if event is None else event)
        sums = torch.zeros(count, dtype=torch.int64)
        return sums.index_add_(0, self.columns[column][live], self.columns["size"][live])

    def rows(self, group: torch.Tensor, names: Sequence[str], event: int | None = None) -> list[Line]:
        """Return the blocks alive after an event in groups, largest first. Only groups without bytes are left out.

        Args:
            group: One index into `names` for each block.
            names: Names of the groups.
            event: Number of the event; by default that of the peak.
        """
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
        """Return the live memory by the innermost line of the user's own code, largest first.

        Lines of torch and of installed packages do not count as the user's. A row's `text` is the source line, if its
        file is there.

        Args:
            event: Number of the event; by default that of the peak.
            named: Returns the name of a line; by default names are like "train.py:41".
        """
        from memopt._memory.recording.user_code import short_name, source_of, user_lines

        named = named or short_name
        frames, index = user_lines(self.stacks)
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
        """Return the live memory by the module whose forward was running when it was requested, largest first.

        Args:
            event: Number of the event; by default that of the peak.
        """
        return self.rows(self.columns["module"], self.modules, event)


# ---- blocks from events ----------------------------------------------------------------------------------------------


class BlockEvents(NamedTuple):
    """The events of blocks, one entry for each block, in the order of their births.

    `event`: the block's birth if that is recorded, else its death.
    """

    born: torch.Tensor
    died: torch.Tensor
    event: torch.Tensor


def pair_events(is_birth: torch.Tensor, address: torch.Tensor) -> BlockEvents:
    """Pair the events, one birth or death each in order, into blocks.

    A death without a birth ends a block that was there before (or since the last death there, where recording paused).
    A birth at an address where a block lives ends that block.
    """
    count = len(address)
    places, order = torch.sort(address, stable=True)
    birth = is_birth[order]
    follows = torch.zeros(count, dtype=torch.bool)  # the one before it is of the same address
    follows[1:] = places[1:] == places[:-1]
    leads = torch.zeros(count, dtype=torch.bool)
    leads[:-1] = follows[1:]
    after = torch.full((count,), count, dtype=torch.int64)
    after[:-1] = torch.where(leads[:-1], order[1:], count)
    before = torch.full((count,), -1, dtype=torch.int64)
    before[1:] = torch.where(follows[1:], order[:-1], -1)
    previous_birth = torch.zeros(count, dtype=torch.bool)
    previous_birth[1:] = follows[1:] & birth[:-1]
    orphan = ~birth & ~previous_birth
    born = torch.cat((order[birth], before[orphan]))
    died = torch.cat((after[birth], order[orphan]))
    event = torch.cat((order[birth], order[orphan]))
    in_time = torch.argsort(born, stable=True)
    return BlockEvents(born[in_time], died[in_time], event[in_time])
