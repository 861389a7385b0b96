"""The memory report of a notebook cell: its peak, by variable, and growth since before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt import _C
from memopt._memory.live.growth import Growth, compare
from memopt._memory.live.live_tensors import live_tensors
from memopt._memory.recording import recorder
from memopt._memory.recording.recording import Line
from memopt._memory.recording.user_code import place
from memopt._runtime.table import Facts


@dataclass(frozen=True)
class CellReport:
    """The memory report of a cell.

    `peak`, `before`, `after`: bytes on `device`; `lines`: the peak's contents by the line that allocated them; `grown`:
    memory that has grown since before the cell, by holder.
    """

    device: str
    peak: int
    before: int
    after: int
    categories: dict[str, int]
    lines: list[Line]
    grown: list[Growth]

    def __str__(self) -> str:
        return str(self._facts())

    __repr__ = __str__

    def _facts(self) -> Facts:
        sizes = [_C.format_size(size) for size in (self.peak, self.before, self.after)]
        first = f"memopt: peak {sizes[0]} on {self.device}; {sizes[1]} before the cell, {sizes[2]} after it"
        rows = [
            ("peak of", [f"{name} {_C.format_size(size)}" for name, size in self.categories.items() if size]),
            (
                "asked by",
                [f"{line.name or 'no line of yours'} {_C.format_size(line.bytes)}" for line in self.lines],
            ),
            ("grown", [_grown(growth) for growth in self.grown]),
        ]
        return Facts(first, [(name, ", ".join(said)) for name, said in rows if said])

    def _repr_html_(self) -> str:
        return self._facts().html()


def _grown(growth: Growth) -> str:
    group = growth.group
    said = [f"{group.count} tensors", group.where, f"graph of {group.nodes} nodes" if group.nodes else ""]
    size = _C.format_size(round(growth.nbytes))
    return f"{group.name or 'no variable'} +{size} ({', '.join(filter(None, said))})"


def watch(run: Callable[[], object]) -> CellReport:
    """Run the cell and report. If a recorder runs already, it is used, and continues."""
    earlier = live_tensors(top=0)
    active = recorder.active()
    recording_here = active if active is not None else recorder.start()
    device = recording_here.devices()[0]
    since = recording_here.position(device)
    try:
        run()
        found = recording_here.recording(device, since=since)
    finally:
        if active is None:
            recording_here.stop()
    later = live_tensors(top=0)
    live = found.live_bytes()
    peak, event = found.peak()
    return CellReport(
        device=found.device,
        peak=peak,
        before=int(live[0]),
        after=int(live[-1]),
        categories=found.by_category(event),
        lines=found.by_line(event, lambda frame: place(frame.file, frame.line))[:5],
        grown=[
            growth
            for growth in compare(earlier, later, 1)
            if growth.nbytes > 0 and growth.group.device == found.device
        ][:5],
    )
