"""A recording on one screen: text for a terminal, HTML for a notebook, a dict for --json; and two of them compared at
their peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from memopt import _C
from memopt._memory.recording import inplace_advice, lower_peak
from memopt._memory.recording import leaks as leaking
from memopt._memory.recording.category_split import in_words
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recording import Line, Recording
from memopt._runtime.table import Code, ResultTable, counted, folded_lines, line_width

_TOP = 5


def steps(recording: Recording) -> int:
    return sum(mark.kind == "step" for mark in recording.marks)


def text(
    recording: Recording,
    leaks: Sequence[Leak] = (),
    top: int = _TOP,
    width: int | None = None,
    *,
    advice: bool = False,
) -> str:
    """width: of a line; by default standard output's. advice: all that would lower the peak, as the page has it."""
    size, width = _C.format_size, width or line_width()
    peak, _ = recording.peak()
    told = [_title(recording), f"  peak {size(peak)} = {_split(recording)}"]
    held = recording.facts.get("peak_reserved")
    if held:
        of = f" of {size(recording.capacity)}" if recording.capacity else ""
        told.append(
            f"  the allocator held at most {size(held)}{of} and retried {recording.facts['retries']} times"
        )
    whole = recording.facts.get("peak_allocated", 0)
    if recording.facts.get("events_lost") and whole > peak:
        told.append(f"  before the recording, the peak was higher: {size(whole)} (allocated, in all)")
    lines = _folded(told, width)
    for title, rows in (("by line", recording.by_line()), ("by module", recording.by_module())):
        named = [row for row in rows if row.name]
        if named:
            lines.append(f"  at the peak, {title}:")
            lines += _table(named[:top], cut=60).lines("    ", width=width, whole=2)
            rest = sum(row.bytes for row in rows) - sum(row.bytes for row in named[:top])
            if rest:
                lines.append(f"    and {size(rest)} elsewhere")
    ends = (mark for mark in recording.marks if mark.kind == "oom")
    told = [f"  out of memory after {mark.event + 1} events: {mark.text}" for mark in ends]
    told += [f"  {one}" for one in leaking.in_words(leaks, peak)]
    told += [] if advice else [f"  {one}" for one in inplace_advice.find(recording)[:top]]
    lines += _folded(told, width)
    if advice and (found := lower_peak.find(recording, leaks)):
        lines += ["  what would lower the peak:", *_folded([f"    {one}" for one in found], width)]
    return "\n".join(lines)


def _folded(told: Sequence[str], width: int) -> list[str]:
    return [line for words in told for line in folded_lines(words, width, further="    ")]


def _title(recording: Recording) -> str:
    seconds = 0.0
    if recording.events:
        seconds = int(recording.times_us[-1] - recording.times_us[0]) / 1e6
    stepped = counted(steps(recording), "optimizer step")
    return f"{recording.device}: {recording.blocks} blocks in {seconds:.1f} s, {stepped} ({recording.source})"


def _split(recording: Recording) -> str:
    parts = [f"{_C.format_size(n)} {name}" for name, n in recording.by_category().items() if n]
    return " + ".join(parts) or "nothing"


def _table(rows: Sequence[Line], heads: Sequence[str] = (), cut: int | None = None) -> ResultTable:
    """cut: characters of a line of source."""
    cells = [
        (_C.format_size(row.bytes), row.name, in_words(row.by_category), Code(row.text[:cut])) for row in rows
    ]
    return ResultTable(cells, heads, left=(1, 2, 3))


def as_html(recording: Recording, leaks: Sequence[Leak] = (), top: int = 2 * _TOP) -> str:
    """Return static HTML, without scripts or styles of its own."""
    peak = _C.format_size(recording.peak()[0])
    parts = [f"<p>{escape(_title(recording))}<br><b>peak {peak}</b> = {escape(_split(recording))}</p>"]
    for title, rows in (("line", recording.by_line()), ("module", recording.by_module())):
        named = [row for row in rows if row.name][:top]
        if named:
            parts.append(_table(named, ("at the peak", title, "category", "")).html())
    advice = [*leaking.in_words(leaks, recording.peak()[0]), *map(str, inplace_advice.find(recording)[:top])]
    if advice:
        parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in advice) + "</ul>")
    return "".join(parts)


def as_dict(recording: Recording, leaks: Sequence[Leak] = (), *, advice: bool = False) -> dict[str, Any]:
    """Return JSON-able values. advice: as for text().

    `peak_allocated` and `peak_reserved` are the allocator's own figures if it gave them, else the recording's;
    `peak_bytes` is the recording's, of requested bytes.
    """
    peak, event = recording.peak()
    reserved = int(recording.reserved_bytes.max()) if len(recording.reserved_bytes) else None
    found = [one.as_dict() for one in lower_peak.find(recording, leaks)] if advice else []
    return {
        "device": recording.device,
        "source": recording.source,
        "peak_bytes": peak,
        "peak_event": event,
        "peak_allocated": recording.facts.get("peak_allocated", peak),
        "peak_reserved": recording.facts.get("peak_reserved", reserved),
        "oom": next((mark.text for mark in recording.marks if mark.kind == "oom"), None),
        "capacity": recording.capacity,
        "events": recording.events,
        "blocks": recording.blocks,
        "steps": steps(recording),
        "by_category": recording.by_category(),
        "by_line": [row._asdict() for row in recording.by_line()],
        "by_module": [row._asdict() for row in recording.by_module()],
        "leaks": [vars(leak) for leak in leaks],
        "in_place": [vars(one) for one in inplace_advice.find(recording)],
        "marks": [mark._asdict() for mark in recording.marks],
        "facts": recording.facts,
    } | ({"would_lower_the_peak": found} if advice else {})


# ---- comparison ------------------------------------------------------------------------------------------------------
# Comparison of two recordings at their peaks: differences by category, line and module.


_TOP_CHANGES = 10


@dataclass(frozen=True)
class PeakChange:
    """Bytes of one category, line or module at the peak of either recording."""

    name: str
    before: int
    after: int
    text: str = ""

    @property
    def more(self) -> int:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """The differences of two recordings, largest first in each list; what did not change is left out."""

    before: PeakChange
    by_category: list[PeakChange]
    by_line: list[PeakChange]
    by_module: list[PeakChange]

    def as_dict(self) -> dict[str, Any]:
        return {
            "peak": asdict(self.before),
            **{
                name: [asdict(change) for change in getattr(self, name)]
                for name in ("by_category", "by_line", "by_module")
            },
        }

    def __str__(self) -> str:
        lines = _rows([self.before])
        for title, changes in (
            ("by category", self.by_category),
            ("by line", self.by_line),
            ("by module", self.by_module),
        ):
            if changes:
                lines += [f"  {title}:", *_rows(changes[:_TOP_CHANGES])]
                if len(changes) > _TOP_CHANGES:
                    rest = changes[_TOP_CHANGES:]
                    lines.append(f"    and {_signed(sum(c.more for c in rest))} in {len(rest)} more")
        if not self.by_category:
            lines.append("  the same at their peaks")
        return "\n".join(lines)


def compare(a: Recording, b: Recording) -> Comparison:
    """Compare two recordings at their peaks.

    Lines match by file and text where their files are available, else by file and number. A line that only moved,
    because something was written above it, is therefore not a difference.
    """
    categories = b.by_category()
    return Comparison(
        PeakChange("peak", a.peak()[0], b.peak()[0]),
        _changed([PeakChange(name, size, categories[name]) for name, size in a.by_category().items()]),
        _changes(a.by_line(), b.by_line()),
        _changes(a.by_module(), b.by_module()),
    )


def _changes(a: list[Line], b: list[Line]) -> list[PeakChange]:
    sums: dict[tuple[str, str], list[int]] = {}
    names: dict[tuple[str, str], str] = {}
    for side, rows in enumerate((a, b)):
        for row in rows:
            key = (row.name.partition(":")[0], row.text) if row.text else (row.name, "")
            names[key] = row.name or "unknown"
            sums.setdefault(key, [0, 0])[side] += row.bytes
    return _changed([PeakChange(names[key], sizes[0], sizes[1], key[1]) for key, sizes in sums.items()])


def _changed(changes: list[PeakChange]) -> list[PeakChange]:
    return sorted((change for change in changes if change.more), key=lambda change: -abs(change.more))


def _signed(size: int) -> str:
    return ("+" if size >= 0 else "-") + _C.format_size(abs(size))


def _rows(changes: list[PeakChange]) -> list[str]:
    size = _C.format_size
    rows = [
        (_signed(one.more), one.name, f"{size(one.before)} -> {size(one.after)}", one.text[:50])
        for one in changes
    ]
    return ResultTable(rows, left=(1, 2, 3)).lines("    ")
