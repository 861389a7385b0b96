"""A recording on one screen: text for a terminal, HTML for a notebook, a dict for --json."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from memopt import _C
from memopt._memory.recording import inplace_advice
from memopt._memory.recording import leaks as leaking
from memopt._memory.recording.category_split import in_words
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recording import Line, Recording
from memopt._runtime.table import Code, ResultTable

_TOP = 5


def steps(recording: Recording) -> int:
    return sum(mark.kind == "step" for mark in recording.marks)


def text(recording: Recording, leaks: Sequence[Leak] = (), top: int = _TOP) -> str:
    size = _C.format_size
    peak, _ = recording.peak()
    lines = [_title(recording), f"  peak {size(peak)} = {_split(recording)}"]
    held = recording.facts.get("peak_reserved")
    if held:
        of = f" of {size(recording.capacity)}" if recording.capacity else ""
        lines.append(
            f"  the allocator held {size(held)} at the most{of}, retried {recording.facts['retries']} times"
        )
    whole = recording.facts.get("peak_allocated", 0)
    if recording.facts.get("events_lost") and whole > peak:
        lines.append(f"  before the recording, the peak was higher: {size(whole)} (allocated, in all)")
    for title, rows in (("by line", recording.by_line()), ("by module", recording.by_module())):
        named = [row for row in rows if row.name]
        if named:
            lines.append(f"  at the peak, {title}:")
            lines += _table(named[:top], cut=60).lines("    ")
            rest = sum(row.bytes for row in rows) - sum(row.bytes for row in named[:top])
            if rest:
                lines.append(f"    and {size(rest)} elsewhere")
    for mark in recording.marks:
        if mark.kind == "oom":
            lines.append(f"  out of memory after {mark.event + 1} events: {mark.text}")
    lines += [f"  {one}" for one in leaking.in_words(leaks, peak)]
    lines += [f"  {one}" for one in inplace_advice.find(recording)[:top]]
    return "\n".join(lines)


def _title(recording: Recording) -> str:
    seconds = 0.0
    if recording.events:
        seconds = int(recording.times_us[-1] - recording.times_us[0]) / 1e6
    return (
        f"{recording.device}: {recording.blocks} blocks in {seconds:.1f} s, {steps(recording)} optimizer steps "
        f"({recording.source})"
    )


def _split(recording: Recording) -> str:
    parts = [f"{_C.format_size(n)} {name}" for name, n in recording.by_category().items() if n]
    return " + ".join(parts) or "nothing"


def _table(rows: Sequence[Line], heads: Sequence[str] = (), cut: int | None = None) -> ResultTable:
    """cut: characters of a line of source."""
    cells = [
        (_C.format_size(row.bytes), in_words(row.by_category), row.name, Code(row.text[:cut])) for row in rows
    ]
    return ResultTable(cells, heads, left=(1, 2, 3))


def as_html(recording: Recording, leaks: Sequence[Leak] = (), top: int = 2 * _TOP) -> str:
    """Return static HTML, without scripts or styles of its own."""
    peak = _C.format_size(recording.peak()[0])
    parts = [f"<p>{escape(_title(recording))}<br><b>peak {peak}</b> = {escape(_split(recording))}</p>"]
    for title, rows in (("line", recording.by_line()), ("module", recording.by_module())):
        named = [row for row in rows if row.name][:top]
        if named:
            parts.append(_table(named, ("at the peak", "category", title, "")).html())
    advice = [*leaking.in_words(leaks, recording.peak()[0]), *map(str, inplace_advice.find(recording)[:top])]
    if advice:
        parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in advice) + "</ul>")
    return "".join(parts)


def as_dict(recording: Recording, leaks: Sequence[Leak] = ()) -> dict[str, Any]:
    """Return JSON-able values.

    `peak_allocated` and `peak_reserved` are the allocator's own figures if it gave them, else the recording's; `peak`
    is the recording's, of requested bytes.
    """
    peak, event = recording.peak()
    reserved = int(recording.reserved_bytes.max()) if len(recording.reserved_bytes) else None
    return {
        "device": recording.device,
        "source": recording.source,
        "peak": peak,
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
    }
