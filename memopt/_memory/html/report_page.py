"""A recording as a page: one HTML file that opens anywhere, from a disk, with no network.

It describes the peak in words and says what would lower it; below are memory over time, the addresses, and the live
memory at any moment by line and by module. All events are in the file (pack_columns), and each zoom draws from them
anew. Everything can be reached by keys alone, and each chart says in words what it shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memopt._memory.html.columns import pack_columns, shorten_addresses
from memopt._memory.html.peak_words import (
    PeakSummary,
    lines_heading,
    peak_difference,
    peak_of,
    peak_sentences,
    seconds_text,
    size_text,
    when_text,
)
from memopt._memory.recording import leaks as leaking
from memopt._memory.recording import lower_peak
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.lower_peak import Suggestion
from memopt._memory.recording.recording import Recording
from memopt._memory.recording.user_code import short_name, source_of, user_frame
from memopt._runtime.table import Html, markup

_HERE = Path(__file__).parent
_SCRIPTS = ("columns", "recording", "chart", "timeline", "allocation_map", "tables", "page")
STACKED = ("parameters", "optimizer", "gradients", "activations", "inputs", "other")
# Nothing is fetched, whatever a library might want to.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def write(
    recordings: Sequence[Recording],
    path: str | Path,
    *,
    title: str,
    names: Sequence[str] | None = None,
    leaks: Sequence[Leak] = (),
) -> None:
    """Write the page of `html()` to a file."""
    page = html(recordings, title=title, names=names, leaks=leaks)
    Path(path).write_text(page, encoding="utf-8")


def html(
    recordings: Sequence[Recording],
    *,
    title: str,
    names: Sequence[str] | None = None,
    first: str = "",
    leaks: Sequence[Leak] = (),
    suggestions: Sequence[Suggestion] | None = None,
) -> str:
    """Return the page.

    Several recordings are shown side by side on the same scales, two with their differences.

    Args:
        recordings: The recordings, at least one.
        title: Title of the page.
        names: Names of the recordings; by default their devices or commands.
        first: Sections of HTML that come before the peak.
        leaks: Likely leaks of the first recording.
        suggestions: What would lower the peak; by default, of one recording, what can be worked out from it.

    Raises:
        ValueError: There are no recordings, too few names, or numbers beyond 2**53.
    """
    if not recordings:
        raise ValueError("recordings is empty: a page needs at least one")
    if names is not None and len(names) != len(recordings):
        raise ValueError(f"names has {len(names)} entries for {len(recordings)} recordings: give one each")
    names = _names(recordings) if names is None else list(names)
    parts = [_Part(recording, name) for recording, name in zip(recordings, names, strict=True)]
    described = {"names": names, "recordings": [part.described for part in parts]}
    further = ""
    if suggestions is None and len(parts) == 1:
        suggestions, further = lower_peak.find(recordings[0], leaks), lower_peak.untried(recordings[0])
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
            '<section class="trouble" id="trouble" role="alert" hidden>This page could not be drawn:</section>',
            '<noscript><section class="trouble">The charts and tables need JavaScript.</section></noscript>',
            first,
            _summaries(parts),
            _leaks(leaks, parts[0]),
            _lower_peak(suggestions or (), further),
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
            *(f"<script>\n{_read(name + '.js')}</script>" for name in _SCRIPTS),
            "</body></html>",
            "",
        ]
    )


# ---- parts that other pages have too ---------------------------------------------------------------------------------


def section(title: str, content: str, attributes: str = "") -> str:
    """Return a section of HTML under its heading."""
    head = f'<div class="head"><h2>{escape(title)}</h2></div>'
    return f"<section{attributes and ' ' + attributes}>{head}{content}</section>"


def folding_lines(text: str) -> str:
    """Return text as lines that fold where there is too little room, further in than they begin."""
    lines = ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip()) + 4
        lines += (
            f'<p style="padding-left: {indent}ch; text-indent: -4ch">{escape(line.strip()) or "&nbsp;"}</p>'
        )
    return f'<div class="note">{lines}</div>'


def folding_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Return a table whose rows become blocks where there is too little room: a cell with its head on each line.

    heads: of the columns, the first of which names the rows; left: the further ones that are aligned to the left. A
    cell is text, or Html.
    """

    def kind(n: int) -> str:
        return "" if not n or n in left else ' class="number"'

    header = "".join(f'<th scope="col"{kind(n)}>{escape(head)}</th>' for n, head in enumerate(heads))
    body = "".join(
        f'<tr><th scope="row">{markup(first)}</th>'
        + "".join(
            f'<td{kind(n)} data-head="{escape(heads[n])}">{markup(cell)}</td>'
            for n, cell in enumerate(cells, 1)
        )
        + "</tr>"
        for first, *cells in rows
    )
    return f'<table class="contents folding"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'


# ---- what goes in ----------------------------------------------------------------------------------------------------


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
        mapped = shorten_addresses(columns["address"], columns["size"])
        self.addresses = mapped.size
        times = recording.times_us
        packed = pack_columns(
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
        self.words = peak_sentences(recording, self.peak)
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
        words = f'<p class="summary">{peak_difference([p.peak for p in parts], [p.name for p in parts])}</p>'
    head = '<div class="head"><h2>The peak</h2></div>'
    return f'<section id="summary">{head}{words}<div class="pair">{each}</div></section>'


def _summary(part: _Part, several: bool) -> str:
    recording, peak = part.recording, part.peak
    shares = "".join(
        f'<span class="{name}" style="flex: {bytes_}" title="{name} {size_text(bytes_)}"></span>'
        for name in STACKED
        if (bytes_ := peak.by_category[name])
    )
    legend = "".join(
        f'<li><span class="swatch {name}"></span>{name} <b>{size_text(peak.by_category[name])}</b></li>'
        for name in STACKED
        if peak.by_category[name]
    )
    told = ", ".join(
        f"{name} {size_text(peak.by_category[name])}" for name in STACKED if peak.by_category[name]
    )
    label = f"The peak of {size_text(peak.bytes)} by category: {told or 'nothing'}"
    largest = "".join(
        f'<li><b>{size_text(bytes_)}</b><span class="code">{escape(line.name)} '
        f'<span class="text">{escape(line.text)}</span></span></li>'
        for line, bytes_ in part.largest
    )
    heading = f"<h3>{escape(part.name)}</h3>" if several else ""
    lead = lines_heading([bytes_ for _, bytes_ in part.largest], peak.bytes)
    source = (
        f"{recording.device}, {recording.source}: {recording.blocks:,} blocks, {recording.events:,} events"
    )
    return (
        f'<div class="one">{heading}<div class="told"><p class="summary">{" ".join(part.words)}</p>'
        f'<div><p class="lead">{lead}</p><ul class="largest">{largest}</ul></div></div>'
        f'<div class="whole" role="img" aria-label="{escape(label)}">{shares}</div>'
        f'<ul class="legend">{legend}</ul><p class="source">{escape(source)}</p></div>'
    )


def _leaks(leaks: Sequence[Leak], part: _Part) -> str:
    if not leaks:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in leaking.in_words(leaks, part.peak.bytes))
    return section("Likely leaks", f'<ul class="leaks">{lines}</ul>', 'class="trouble" id="leaks"')


def _lower_peak(suggestions: Sequence[Suggestion], further: str) -> str:
    """Return what would lower the peak; where nothing is known, nothing."""
    if not suggestions and not further:
        return ""
    content = ""
    if suggestions:
        saving = any(one.saves for one in suggestions)
        heads = ["Change, and the line to write", *(["Saves"] if saving else []), "Peak then", "Cost"]
        rows = [
            [
                Html(
                    escape(one.change)
                    + (one.where and f' <span class="quiet">{escape(one.where)}</span>')
                    + (one.paste and f'<span class="code">{escape(one.paste)}</span>')
                ),
                *([f"−{size_text(one.saves)}"] if saving else []),
                size_text(one.peak),
                one.cost,
            ]
            for one in suggestions
        ]
        content = folding_table(heads, rows, left=(len(heads) - 1,))
        content += f'<p class="hint">{lower_peak.WORKED_OUT if saving else lower_peak.TRIED}</p>'
    content += further and f'<p class="summary">{further}</p>'
    return section("What would lower the peak", content, 'class="lower" id="lower"')


def _charts(parts: list[_Part]) -> str:
    def choice(label: str, *choices: tuple[str, str]) -> str:
        buttons = "".join(
            f'<button type="button" data-do="{do}" aria-pressed="{str(not n).lower()}">{text}</button>'
            for n, (do, text) in enumerate(choices)
        )
        return f'<span class="joined" role="group" aria-label="{label}">{buttons}</span>'

    colours = choice("Colours by", ("by-category", "Category"), ("by-module", "Module"), ("by-line", "Line"))
    buttons = (
        f'<div class="buttons">{colours}{choice("Axis", ("time", "Time"), ("events", "Events"))}'
        '<button type="button" data-do="in">Zoom in</button><button type="button" data-do="out">Zoom out</button>'
        '<button type="button" data-do="all">All</button></div>'
    )
    legend = [f'<li><span class="swatch {name}"></span>{name}</li>' for name in STACKED]
    if any(len(part.recording.reserved_events) for part in parts):
        legend.append('<li><span class="line"></span>reserved by the allocator</li>')
    several = len(parts) > 1

    def row(kind: str, height: int, label: Callable[[_Part], str]) -> str:
        charts = "".join(
            f'<div class="one">{f"<h3>{escape(part.name)}</h3>" if several else ""}'
            f'<div class="chart" id="{kind}-{i}" style="height: {height}px" role="slider" tabindex="0" '
            f'aria-valuemin="0" aria-valuemax="{part.recording.events}" aria-valuenow="{part.peak.event + 1}" '
            f'aria-describedby="keys" aria-label="{escape(label(part))}"></div></div>'
            for i, part in enumerate(parts)
        )
        return f'<div class="pair">{charts}</div>'

    return (
        f'<section id="over-time"><div class="head"><h2>Memory over time</h2>{buttons}</div>'
        f'<ul class="legend" id="legend">{"".join(legend)}</ul>{row("timeline", 300, _timeline_label)}'
        '<p class="hint use">Drag over a part to see it in detail, double-click for all. '
        "Click on a moment to see what was live then, on a line or module below to see its own memory here.</p>"
        f'<p class="hint keys" id="keys">{_KEYS}</p></section>'
        '<section id="addresses"><div class="head"><h2>Allocation map</h2></div>'
        '<p class="hint">Addresses increase upwards; those that no block ever used are left out. '
        f"The paler an area, the more of it is free.</p>{row('map', 380, _map_label)}</section>"
    )


_KEYS = (
    "By keys: <kbd>←</kbd> <kbd>→</kbd> move the moment, <kbd>Page Up</kbd> <kbd>Page Down</kbd> by a step, "
    "<kbd>Home</kbd> <kbd>End</kbd> to the ends, <kbd>P</kbd> to the peak; <kbd>+</kbd> <kbd>−</kbd> zoom, "
    "<kbd>0</kbd> shows all; in the map <kbd>↑</kbd> <kbd>↓</kbd> go through the blocks."
)


def _timeline_label(part: _Part) -> str:
    recording, peak = part.recording, part.peak
    ends = int(recording.live_bytes()[-1])
    return (
        f"Memory over time of {part.name}: peak {size_text(peak.bytes)}, {when_text(recording, peak)}; "
        f"{size_text(ends)} at the end"
    )


def _map_label(part: _Part) -> str:
    recording = part.recording
    return (
        f"Allocation map of {part.name}: {recording.blocks:,} blocks in {size_text(part.addresses)} of "
        f"addresses, {size_text(part.peak.bytes)} of them in use at the peak"
    )


def _tables(parts: list[_Part]) -> str:
    oom = any(mark.kind == "oom" for part in parts for mark in part.recording.marks)
    kinds = [("peak", "Peak"), ("end", "End"), *([("oom", "Out of memory")] if oom else [])]
    buttons = "".join(f'<button type="button" data-do="{do}">{text}</button>' for do, text in kinds)
    moments = "".join(
        f'<p class="hint" role="status">{escape(part.name) + ", " if len(parts) > 1 else ""}'
        f'<span id="moment-{i}">at the peak</span></p>'
        for i, part in enumerate(parts)
    )

    # As high as the table will be, so that nothing moves when it comes.
    def table(group: str, rows: int) -> str:
        height = f"--rows: {min(rows, 12) + 2}; --more: {int(rows > 12)}"
        return f'<div class="table" id="by-{group}" style="{height}"></div>'

    return (
        '<section id="contents"><div class="head"><h2>Live memory</h2>'
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


# ---- the plan of auto_checkpoint -------------------------------------------------------------------------------------


def plan_table(plan: Mapping[str, Any] | str) -> str:
    """Return the table of a `Plan.as_dict()`, or of a plan's text."""
    title = "The plan of auto_checkpoint"
    if isinstance(plan, str):
        return section(title, folding_lines(plan), 'id="plan"')
    words = (
        f"{len(plan['stages']) - 1} stages within {size_text(plan['memory_budget'])}: "
        f"<strong>{size_text(plan['peak_bytes'])}</strong> and {seconds_text(plan['seconds'])} a step, where keeping "
        f"everything takes {size_text(plan['plain_bytes'])} and {seconds_text(plan['plain_seconds'])}. "
        f"{size_text(plan['fixed_bytes'])} of it is live regardless of how the stages are run."
    )
    rows = [
        (
            stage["name"],
            size_text(stage["saved_bytes"]),
            size_text(stage["output_bytes"]),
            seconds_text(stage["forward_seconds"]),
            seconds_text(stage["backward_seconds"]),
            str(stage["runs"]),
            stage["keeps"],
        )
        for stage in plan["stages"]
    ]
    heads = ("Stage", "Saves", "Output", "Forward", "Backward", "Runs", "At first keeps")
    table = folding_table(heads, rows, left=(6,))
    return section(title, f'<p class="summary">{words}</p><div class="plan">{table}</div>', 'id="plan"')


# ---- the user's lines ------------------------------------------------------------------------------------------------


class SourceLine(NamedTuple):
    """A source line of the user's.

    name: "train.py:41", or with its whole path where that tells two files apart; "" if no line of a stack is the
    user's.
    """

    name: str
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""


def source_lines(recording: Recording) -> tuple[list[SourceLine], torch.Tensor]:
    """The lines, the first of them "not known", and of each block the index of its own: [blocks]."""
    lines = [SourceLine("")]
    known: dict[tuple[str, int], int] = {}
    of_stack = []
    for stack in recording.stacks:
        frame = user_frame(stack)
        if frame is None:
            of_stack.append(0)
            continue
        at = known.setdefault((frame.file, frame.line), len(lines))
        if at == len(lines):
            lines.append(SourceLine(short_name(frame), *frame, source_of(frame)))
        of_stack.append(at)
    return _told_apart(lines), torch.tensor(of_stack, dtype=torch.int64)[recording.columns["stack"]]


def _told_apart(lines: list[SourceLine]) -> list[SourceLine]:
    files = Counter(line.name for line in lines)
    return [
        line if files[line.name] == 1 else line._replace(name=f"{line.file}:{line.line}") for line in lines
    ]
