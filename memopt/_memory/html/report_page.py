"""A recording as a page: one HTML file that opens anywhere, from a disk, with no network.

It describes the peak in words; below are memory over time, the addresses, and the live memory at any moment by line and
by module. All events are in the file (packed_columns.py), and each zoom draws from them anew. plotly draws axes and
areas; its script is in the file too, compressed.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from memopt._memory.html.address_space import shorten
from memopt._memory.html.packed_columns import pack
from memopt._memory.html.plan_table import plan_table
from memopt._memory.html.source_lines import SourceLine, source_lines
from memopt._memory.html.summary import PeakSummary, difference, of_lines, peak_of, sentences, size
from memopt._memory.recording.recording import Recording

_HERE = Path(__file__).parent
_SCRIPTS = ("columns", "recording", "chart", "timeline", "allocation_map", "tables", "page")
_STACKED = ("parameters", "optimizer", "gradients", "activations", "inputs", "other")
# Nothing is fetched, whatever a library might want to.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write(
    recordings: Sequence[Recording],
    path: str | Path,
    *,
    title: str,
    names: Sequence[str] | None = None,
) -> None:
    """Write the page of `html()` to a file."""
    page = html(recordings, title=title, names=names)
    Path(path).write_text(page, encoding="utf-8")


def html(
    recordings: Sequence[Recording], *, title: str, names: Sequence[str] | None = None, note: str = ""
) -> str:
    """Return the page.

    Several recordings are shown side by side on the same scales, two with their differences; `names` are theirs; `note`
    is text that comes first, on lines of its own. Raises ImportError if plotly is missing, ValueError for no recordings
    or numbers beyond 2**53.
    """
    if not recordings:
        raise ValueError("recordings is empty: a page needs one at least")
    if names is not None and len(names) != len(recordings):
        raise ValueError(f"names has {len(names)} entries for {len(recordings)} recordings: give one each")
    names = _names(recordings) if names is None else list(names)
    library = _plotly()
    parts = [_Part(recording, name) for recording, name in zip(recordings, names, strict=True)]
    described = {"names": names, "recordings": [part.described for part in parts]}
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_read('page.css')}</style></head>",
            f'<body style="--columns: {min(2, len(parts))}">',
            f"<header><h1>{escape(title)}</h1><p>memory, as memopt recorded it</p></header>",
            f'<main class="{"several" if len(parts) > 1 else "one"}">',
            '<section class="trouble" id="trouble" hidden>This page could not be drawn:</section>',
            f'<section><pre class="note">{escape(note)}</pre></section>' if note else "",
            _summaries(parts),
            _charts(parts),
            _tables(parts),
            *(plan_table(part.recording.facts["plan"]) for part in parts if part.recording.facts.get("plan")),
            "</main>",
            f"<footer>{'<br>'.join(_about(part) for part in parts)}</footer>",
            f'<script type="application/json" id="described">{_json(described)}</script>',
            *(
                f'<script type="text/plain" id="columns-{i}">{part.base64}</script>'
                for i, part in enumerate(parts)
            ),
            f'<script type="text/plain" id="plotly">{library}</script>',
            *(f"<script>\n{_read(name + '.js')}</script>" for name in _SCRIPTS),
            "</body></html>",
            "",
        ]
    )


# ---- what goes in ----------------------------------------------------------------------------------------------------


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"the report page draws with plotly, which cannot be imported ({error}): pip install 'memopt[report]'"
        ) from error
    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 6)).decode()


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON that can stand within a script element, which "</script" and "<!--" would end or change."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _names(recordings: Sequence[Recording]) -> list[str]:
    """Return names of the recordings: devices if they differ, else programs."""
    devices = [recording.device for recording in recordings]
    if len(set(devices)) == len(devices):
        return devices
    names = []
    for number, recording in enumerate(recordings):
        command = recording.facts.get("command") or [recording.device]
        names.append(f"{chr(ord('A') + number % 26)}: {command[0] if isinstance(command, list) else command}")
    return names


class _Part:
    """The part of a page for one recording."""

    def __init__(self, recording: Recording, name: str) -> None:
        self.recording, self.name = recording, name
        self.peak: PeakSummary = peak_of(recording)
        self.lines, line = source_lines(recording)
        columns = recording.columns
        order = torch.argsort(columns["born"], stable=True)
        mapped = shorten(columns["address"], columns["size"])
        times = recording.times_us
        packed = pack(
            {
                "born": columns["born"][order],
                "died": columns["died"][order],
                "size": columns["size"][order],
                "place": mapped.offsets[order],
                "line": line[order],
                "module": columns["module"][order],
                "category": columns["category"][order],
                # A clock that was set back would have moments in no order.
                "times": times.cummax(0).values if len(times) else times,
                "reserved_events": recording.reserved_events,
                "reserved_bytes": recording.reserved_bytes,
            }
        )
        self.base64 = packed.base64
        live = recording.live_at(self.peak.event)
        self.rows = {"line": len(line[live].unique()), "module": len(columns["module"][live].unique())}
        largest = recording.rows(line, [str(n) for n in range(len(self.lines))], self.peak.event)
        self.largest: list[tuple[SourceLine, int]] = [
            (self.lines[int(row.name)], row.bytes) for row in largest if int(row.name)
        ][:3]
        self.words = sentences(recording, self.peak)
        self.described = {
            "device": recording.device,
            "capacity": recording.capacity,
            "peak": self.peak.event + 1,
            "places": mapped.size,
            "ranges": {"starts": [str(start) for start in mapped.starts], "at": mapped.at},
            "lines": [line._asdict() for line in self.lines],
            "modules": recording.modules,
            "marks": [mark._asdict() for mark in recording.marks],
            "columns": packed.columns,
        }


# ---- the parts of the page -------------------------------------------------------------------------------------------


def _summaries(parts: list[_Part]) -> str:
    several = len(parts) > 1
    each = "".join(_summary(part, several) for part in parts)
    words = ""
    if len(parts) == 2:
        words = f'<p class="summary">{difference([p.peak for p in parts], [p.name for p in parts])}</p>'
    head = '<div class="head"><h2>The peak</h2></div>'
    return f'<section id="summary">{head}{words}<div class="pair">{each}</div></section>'


def _summary(part: _Part, several: bool) -> str:
    recording, peak = part.recording, part.peak
    shares = "".join(
        f'<span class="{name}" style="flex: {bytes_}" title="{name} {size(bytes_)}"></span>'
        for name in _STACKED
        if (bytes_ := peak.by_category[name])
    )
    legend = "".join(
        f'<li><span class="swatch {name}"></span>{name} <b>{size(peak.by_category[name])}</b></li>'
        for name in _STACKED
        if peak.by_category[name]
    )
    largest = "".join(
        f'<li><b>{size(bytes_)}</b><span class="code">{escape(line.name)} '
        f'<span class="text">{escape(line.text)}</span></span></li>'
        for line, bytes_ in part.largest
    )
    heading = f"<h3>{escape(part.name)}</h3>" if several else ""
    lead = of_lines([bytes_ for _, bytes_ in part.largest], peak.bytes)
    source = (
        f"{recording.device}, {recording.source}: {recording.blocks:,} blocks, {recording.events:,} events"
    )
    return (
        f'<div class="one">{heading}<div class="told"><p class="summary">{" ".join(part.words)}</p>'
        f'<div><p class="lead">{lead}</p><ul class="largest">{largest}</ul></div></div>'
        f'<div class="whole" role="img" aria-label="the peak by category">{shares}</div>'
        f'<ul class="legend">{legend}</ul><p class="source">{escape(source)}</p></div>'
    )


def _charts(parts: list[_Part]) -> str:
    buttons = (
        '<div class="buttons"><span class="joined">'
        '<button type="button" data-do="time" aria-pressed="true">Time</button>'
        '<button type="button" data-do="events" aria-pressed="false">Events</button></span>'
        '<button type="button" data-do="in">Zoom in</button><button type="button" data-do="out">Zoom out</button>'
        '<button type="button" data-do="all">All</button></div>'
    )
    keys = '<li><span class="line"></span>reserved by the allocator</li>'
    if any(part.recording.capacity for part in parts):
        keys += '<li><span class="line dashed"></span>capacity</li>'
    legend = "".join(f'<li><span class="swatch {name}"></span>{name}</li>' for name in _STACKED)
    several = len(parts) > 1

    def row(kind: str, height: int) -> str:
        heading = "<h3>{}</h3>" if several else "{}"
        charts = "".join(
            f'<div class="one">{heading.format(escape(part.name) if several else "")}'
            f'<div class="chart" id="{kind}-{i}" style="height: {height}px"></div></div>'
            for i, part in enumerate(parts)
        )
        return f'<div class="pair">{charts}</div>'

    return (
        f'<section><div class="head"><h2>Memory over time</h2>{buttons}</div>'
        f'<ul class="legend">{legend}{keys}</ul>{row("timeline", 300)}'
        '<p class="hint">Drag over a part to see it in detail, double-click for all. '
        "Click on a moment for what lived then.</p></section>"
        '<section><div class="head"><h2>Allocation map</h2></div>'
        '<p class="hint">Addresses upwards; those that no block ever had are left out. '
        f"The paler, the more of it is free.</p>{row('map', 380)}</section>"
    )


def _tables(parts: list[_Part]) -> str:
    oom = any(mark.kind == "oom" for part in parts for mark in part.recording.marks)
    kinds = [("peak", "Peak"), ("end", "End"), *([("oom", "Out of memory")] if oom else [])]
    buttons = "".join(f'<button type="button" data-do="{do}">{text}</button>' for do, text in kinds)
    moments = "".join(
        f'<p class="hint">{escape(part.name) + ", " if len(parts) > 1 else ""}'
        f'<span id="moment-{i}">at the peak</span></p>'
        for i, part in enumerate(parts)
    )

    # As high as the table will be, so that nothing moves when it comes.
    def table(group: str, rows: int) -> str:
        height = f"--rows: {min(rows, 12) + 2}; --more: {int(rows > 12)}"
        return f'<div class="table" id="by-{group}" style="{height}"></div>'

    return (
        '<section id="contents"><div class="head"><h2>What lived</h2>'
        f'<div class="buttons">{buttons}</div></div>{moments}'
        f"<h3>By line</h3>{table('line', max(part.rows['line'] for part in parts))}"
        f"<h3>By module</h3>{table('module', max(part.rows['module'] for part in parts))}</section>"
    )


def _about(part: _Part) -> str:
    facts = part.recording.facts
    command, versions = facts.get("command"), facts.get("versions")
    told = [part.name, " ".join(map(str, command)) if isinstance(command, list) else command]
    if isinstance(versions, dict):
        told.append(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    told += [facts.get("device_name"), part.recording.source]
    return escape(" · ".join(str(text) for text in told if text))
