"""The peak of a recording in words, as HTML: how much, when, of what."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from memopt import _C
from memopt._memory.recording.recording import CATEGORIES, Recording


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


def when_text(recording: Recording, peak: PeakSummary) -> str:
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
        else f"Memory peaked at <strong>{size_text(peak.bytes)}</strong>, {when_text(recording, peak)}."
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
    retries = recording.facts.get("retries")
    if isinstance(retries, int) and retries > 0:
        times = "once" if retries == 1 else f"{retries:,} times"
        told.append(
            f'<span class="oom">The allocator had to free its cache {times}</span>: it was nearly full.'
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
