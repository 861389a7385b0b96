"""What a cell did to memory: its peak, whose that was, and what has grown."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass

from memopt import _C
from memopt.owners.growth import Growth, compare
from memopt.owners.live import live_tensors
from memopt.owners.user_files import place
from memopt.profiling import recorder
from memopt.profiling.recording import Line


@dataclass(frozen=True)
class CellReport:
    """`peak`, `before`, `after`: bytes of what was watched on `device`; `lines`: the peak's contents by the line that
    asked for them; `grown`: what is more than before the cell, by holder."""

    device: str
    peak: int
    before: int
    after: int
    categories: dict[str, int]
    lines: list[Line]
    grown: list[Growth]

    def __str__(self) -> str:
        return "\n".join(
            [self._first(), *(f"  {title:<9} {', '.join(rows)}" for title, rows in self._rows() if rows)]
        )

    __repr__ = __str__

    def _first(self) -> str:
        sizes = [_C.format_size(size) for size in (self.peak, self.before, self.after)]
        return f"memopt: peak {sizes[0]} on {self.device}; {sizes[1]} before the cell, {sizes[2]} after it"

    def _rows(self) -> list[tuple[str, list[str]]]:
        return [
            ("peak of", [f"{name} {_C.format_size(size)}" for name, size in self.categories.items() if size]),
            (
                "asked by",
                [f"{line.name or 'no line of yours'} {_C.format_size(line.bytes)}" for line in self.lines],
            ),
            ("grown", [_grown(growth) for growth in self.grown]),
        ]

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{title}</td><td>{'<br>'.join(map(html.escape, said))}</td></tr>"
            for title, said in self._rows()
            if said
        )
        return f"<div>{html.escape(self._first())}</div><table><tbody>{rows}</tbody></table>"


def _grown(growth: Growth) -> str:
    group = growth.group
    said = [f"{group.count} tensors", group.where, f"graph of {group.nodes} nodes" if group.nodes else ""]
    size = _C.format_size(round(growth.nbytes))
    return f"{group.name or 'no variable'} +{size} ({', '.join(filter(None, said))})"


def watch(run: Callable[[], object]) -> CellReport:
    """Runs it, and tells. Where memory is being recorded already, that recording goes on and tells."""
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
