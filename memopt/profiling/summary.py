"""A recording on one screen: text for a terminal, HTML for a notebook, a dict for --json."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from memopt import _C
from memopt.profiling import in_place
from memopt.profiling import leaks as leaking
from memopt.profiling.category_split import in_words
from memopt.profiling.leaks import Leak
from memopt.profiling.recording import Line, Recording

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
        lines.append(f"  before what is recorded, the peak was higher: {size(whole)} (allocated, in all)")
    for title, rows in (("by line", recording.by_line()), ("by module", recording.by_module())):
        named = [row for row in rows if row.name]
        if named:
            lines.append(f"  at the peak, {title}:")
            lines += _table(named[:top])
            rest = sum(row.bytes for row in rows) - sum(row.bytes for row in named[:top])
            if rest:
                lines.append(f"    {size(rest):>9}  elsewhere")
    for mark in recording.marks:
        if mark.kind == "oom":
            lines.append(f"  out of memory after {mark.event + 1} events: {mark.text}")
    lines += [f"  {one}" for one in leaking.in_words(leaks, peak)]
    lines += [f"  {one}" for one in in_place.find(recording)[:top]]
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


def _table(rows: Sequence[Line]) -> list[str]:
    purposes = [in_words(row.by_category) for row in rows]
    wide, width = max(map(len, purposes)), max(len(row.name) for row in rows)
    return [
        f"    {_C.format_size(row.bytes):>9}  {purpose:<{wide}} {row.name:<{width}}  {row.text:.60}".rstrip()
        for row, purpose in zip(rows, purposes, strict=True)
    ]


def as_html(recording: Recording, leaks: Sequence[Leak] = (), top: int = 2 * _TOP) -> str:
    """Static: no script, no style of its own."""
    escape = html.escape
    parts = [f"<p>{escape(_title(recording))}<br><b>peak {_C.format_size(recording.peak()[0])}</b> = "]
    parts.append(f"{escape(_split(recording))}</p>")
    for title, rows in (("line", recording.by_line()), ("module", recording.by_module())):
        cells = "".join(
            f"<tr><td>{_C.format_size(row.bytes)}</td><td>{in_words(row.by_category)}</td><td>{escape(row.name)}</td>"
            f"<td><code>{escape(row.text)}</code></td></tr>"
            for row in [row for row in rows if row.name][:top]
        )
        if cells:
            heads = f"<th>at the peak</th><th>category</th><th>{title}</th><th></th>"
            parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>")
    advice = [*leaking.in_words(leaks, recording.peak()[0]), *map(str, in_place.find(recording)[:top])]
    if advice:
        parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in advice) + "</ul>")
    return "".join(parts)


def as_dict(recording: Recording, leaks: Sequence[Leak] = ()) -> dict[str, Any]:
    """JSON-able. `peak_allocated` and `peak_reserved` are the allocator's own figures where it gave them, else what the
    recording shows; `peak` is what the recording shows of what was asked for."""
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
        "in_place": [vars(one) for one in in_place.find(recording)],
        "marks": [mark._asdict() for mark in recording.marks],
        "facts": recording.facts,
    }
