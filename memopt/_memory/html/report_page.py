"""A recording as a page: one HTML file that opens anywhere, from a disk, with no network.

It describes the peak in words; below are memory over time, the addresses, and the live memory at any moment by line and
by module. All events are in the file (pack_columns), and each zoom draws from them anew. plotly draws axes and
areas; its script is in the file too, compressed.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memopt import _C
from memopt._memory.recording.recording import CATEGORIES, Recording
from memopt._memory.recording.user_code import short_name, source_of, user_frame

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
        raise ValueError("recordings is empty: a page needs at least one")
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
        mapped = shorten_addresses(columns["address"], columns["size"])
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
        for name in _STACKED
        if (bytes_ := peak.by_category[name])
    )
    legend = "".join(
        f'<li><span class="swatch {name}"></span>{name} <b>{size_text(peak.by_category[name])}</b></li>'
        for name in _STACKED
        if peak.by_category[name]
    )
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
        "Click on a moment to see what was live then.</p></section>"
        '<section><div class="head"><h2>Allocation map</h2></div>'
        '<p class="hint">Addresses increase upwards; those that no block ever used are left out. '
        f"The paler an area, the more of it is free.</p>{row('map', 380)}</section>"
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
    head = '<div class="head"><h2>The plan of auto_checkpoint</h2></div>'
    if isinstance(plan, str):
        return f'<section id="plan">{head}<pre>{escape(plan)}</pre></section>'
    words = (
        f"{len(plan['stages']) - 1} stages within {size_text(plan['memory_budget'])}: "
        f"<strong>{size_text(plan['peak_bytes'])}</strong> and {seconds_text(plan['seconds'])} a step, where keeping "
        f"everything takes {size_text(plan['plain_bytes'])} and {seconds_text(plan['plain_seconds'])}. "
        f"{size_text(plan['fixed_bytes'])} of it is live regardless of how the stages are run."
    )
    rows = "".join(
        f"<tr><td>{escape(stage['name'])}</td>"
        f'<td class="number">{size_text(stage["saved_bytes"])}</td>'
        f'<td class="number">{size_text(stage["output_bytes"])}</td>'
        f'<td class="number">{seconds_text(stage["forward_seconds"])}</td>'
        f'<td class="number">{seconds_text(stage["backward_seconds"])}</td>'
        f'<td class="number">{stage["runs"]}</td><td>{escape(stage["keeps"])}</td></tr>'
        for stage in plan["stages"]
    )
    names = ("Stage", "Saves", "Output", "Forward", "Backward", "Runs", "At first keeps")
    header = "".join(
        f'<th scope="col"{"" if n in (0, 6) else chr(32) + "class=number"}>{name}</th>'
        for n, name in enumerate(names)
    )
    return (
        f'<section id="plan">{head}<p class="summary">{words}</p><div class="plan"><table class="contents">'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


# ---- the peak in words -----------------------------------------------------------------------------------------------


class PeakSummary(NamedTuple):
    """The peak, and the memory alive then. event: -1 if it is before the first. reserved: None if it is not known."""

    event: int
    bytes: int
    seconds: float
    by_category: dict[str, int]
    reserved: int | None


def size_text(bytes_: int) -> str:
    return _C.format_size(bytes_).replace(" ", "\u00a0")


def share_text(part: int, whole: int) -> str:
    """A percentage that is never rounded to nothing or to all."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 1:
        return "under 1\u00a0%"
    if 99 < percent < 100:
        return "over 99\u00a0%"
    return f"{percent:.0f}\u00a0%"


def seconds_text(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            shown = value * factor
            return f"{shown:.3g}\u00a0{unit}" if shown < 100 else f"{shown:.0f}\u00a0{unit}"
    raise AssertionError


def peak_of(recording: Recording) -> PeakSummary:
    most, event = recording.peak()
    times = recording.times_us
    after = int(times[event] - times[0]) / 1e6 if event >= 0 else 0.0
    held = (recording.reserved_events <= event).nonzero().flatten()
    reserved = int(recording.reserved_bytes[held[-1]]) if len(held) else None
    return PeakSummary(event, most, after, recording.by_category(event), reserved)


def _when(recording: Recording, peak: PeakSummary) -> str:
    if peak.event < 0:
        return "before the recording began"
    steps = [mark.event for mark in recording.marks if mark.kind == "step"]
    when = f"{seconds_text(peak.seconds)} into the recording"
    if not steps:
        return when
    over = sum(event < peak.event for event in steps)
    if over == len(steps):
        return f"{when}, after the last of {len(steps)} steps"
    return f"{when}, in step {over + 1} of {len(steps)}"


def peak_sentences(recording: Recording, peak: PeakSummary) -> list[str]:
    """Return the sentences as HTML."""
    if not recording.blocks or not peak.bytes:
        return ["No block of memory was live during the recording."]
    one_moment = not recording.events
    told = [
        f"<strong>{size_text(peak.bytes)}</strong> were alive."
        if one_moment
        else f"Memory peaked at <strong>{size_text(peak.bytes)}</strong>, {_when(recording, peak)}."
    ]
    parts = sorted(((n, name) for name, n in peak.by_category.items() if n), reverse=True)
    first, *others = [f"{share_text(n, peak.bytes)} {name}" for n, name in parts]
    told.append(f"It was {first}" + (f", then {', '.join(others)}." if others else "."))
    if peak.reserved is not None:
        idle = peak.reserved - peak.bytes
        told.append(
            f"The allocator held {size_text(peak.reserved)} then"
            + (f", {size_text(idle)} of it not in use." if idle > 0 else ".")
        )
    if recording.capacity:
        told.append(
            f"{'That' if one_moment else 'The peak'} is {share_text(peak.bytes, recording.capacity)} of the "
            f"{size_text(recording.capacity)} available."
        )
    for mark in recording.marks:
        if mark.kind == "oom":
            told.append(f'<span class="oom">Out of memory</span>: {escape(mark.text) or "a request failed"}.')
            break
    if one_moment:
        return told
    left = int(recording.live_bytes()[-1])
    told.append(f"At the end {size_text(left)} were alive." if left else "At the end nothing was alive.")
    return told


def lines_heading(largest: list[int], whole: int) -> str:
    """Return the heading above the lines that hold these bytes, at most three."""
    if not largest:
        return ""
    count = ("One line holds", "Two lines hold", "Three lines hold")[len(largest) - 1]
    return f"{count} {share_text(sum(largest), whole)} of it:"


def peak_difference(peaks: list[PeakSummary], names: list[str]) -> str:
    """Compare two recordings in one sentence of HTML."""
    one, two = peaks
    more = two.bytes - one.bytes
    if not more:
        return f"Both peak at <strong>{size_text(one.bytes)}</strong>."
    changes = {c: two.by_category[c] - one.by_category[c] for c in CATEGORIES}
    largest = max(changes, key=lambda c: abs(changes[c]))
    relative = f" ({share_text(abs(more), one.bytes)})" if one.bytes else ""
    return (
        f"{escape(names[1])} peaks <strong>{size_text(abs(more))} {'higher' if more > 0 else 'lower'}</strong>"
        f"{relative} than {escape(names[0])}; most of the difference is {largest}, "
        f"{'+' if changes[largest] > 0 else '−'}{size_text(abs(changes[largest]))}."
    )


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


# ---- the addresses, without the gaps ---------------------------------------------------------------------------------
# A device's memory is a few ranges far apart, a process's many; a map of all addresses would show nothing. The widest
# ranges that no block ever touched are therefore cut out, until the remaining gaps are together at most an eighth of
# the touched ranges.


class ShortenedAddresses(NamedTuple):
    """Blocks in the shortened address space.

    offsets: of each block, in a space of `size` bytes. starts: the address of each range that was kept whole; at: its
    offset.
    """

    offsets: torch.Tensor
    size: int
    starts: list[int]
    at: list[int]


def shorten_addresses(address: torch.Tensor, size: torch.Tensor) -> ShortenedAddresses:
    """Shorten the address space of blocks at `address` [n], `size` [n] bytes long. They may overlap in time."""
    if not len(address):
        return ShortenedAddresses(address, 0, [], [])
    first = address.unique()  # ascending
    # The end of all that begins at or before each of these.
    ends = torch.zeros_like(first).scatter_reduce_(
        0, torch.searchsorted(first, address), address + size, "amax", include_self=False
    )
    ends = ends.cummax(0).values
    gaps = (first[1:] - ends[:-1]).clamp_(min=0)
    touched = int(ends[-1] - first[0]) - int(gaps.sum())
    smallest = gaps.sort().values
    kept = int((smallest.cumsum(0) <= touched // 8).sum())
    cut = gaps >= smallest[kept] if kept < len(gaps) else torch.zeros_like(gaps, dtype=torch.bool)
    removed = torch.zeros_like(first)
    removed[1:] = torch.where(cut, gaps, 0).cumsum(0)
    places = first - first[0] - removed
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), cut.nonzero().flatten() + 1))
    return ShortenedAddresses(
        places[torch.searchsorted(first, address)],
        int(ends[-1] - first[0] - removed[-1]),
        first[begins].tolist(),
        places[begins].tolist(),
    )


# ---- columns of integers in few bytes --------------------------------------------------------------------------------
# A column is written as its differences if it never falls (times, births), else as offsets from its minimum; first the
# lowest byte of every number, then the next byte of every number, as many as the largest number needs. Such planes are
# long runs and repetitions, which deflate makes small, and a page adds them up again without parsing anything. All
# planes of all columns are one zlib stream, in base64. columns.js is the other half.


EXACT = 2**53  # above it a page's numbers are not integers any more


class Packed(NamedTuple):
    """Packed columns. `columns`: by name, how to read the column back. `base64`: the planes."""

    columns: dict[str, dict[str, int | bool]]
    base64: str


def _memory_of(tensor: torch.Tensor) -> bytearray:
    """A tensor's memory, without NumPy."""
    content = bytearray(tensor.numel() * tensor.element_size())
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.flatten())
    return content


def _planes(numbers: torch.Tensor, count: int) -> bytearray:
    """The lowest `count` bytes of each number, byte by byte: [count, n]."""
    parts = numbers.contiguous().view(torch.uint8).view(-1, 8)
    return _memory_of(parts[:, :count].t().contiguous())


def pack_columns(columns: dict[str, torch.Tensor]) -> Packed:
    """Pack int64 columns of any lengths. Raise ValueError for a number that a page cannot hold."""
    described: dict[str, dict[str, int | bool]] = {}
    content = bytearray()
    for name, column in columns.items():
        if not len(column):
            described[name] = {"count": 0, "planes": 0, "low": 0, "differences": False, "high": 0}
            continue
        low, high = int(column.min()), int(column.max())
        if max(abs(low), abs(high)) > EXACT:
            raise ValueError(
                f"column {name!r} goes from {low} to {high}: a page can hold only integers up to "
                "2**53 exactly"
            )
        steps = column.diff(prepend=column[:1])
        rises = bool((steps >= 0).all())
        numbers = steps if rises else column - low
        planes = (int(numbers.max()).bit_length() + 7) // 8
        described[name] = {
            "count": len(column),
            "planes": planes,
            "low": low,
            "differences": rises,
            "high": high,
        }
        content += _planes(numbers, planes)
    return Packed(described, base64.b64encode(zlib.compress(content, 6)).decode())
