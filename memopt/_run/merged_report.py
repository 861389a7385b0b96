"""Report of all ranks of a job: each one's peak, how far they are apart, what the one with the most
has more of than the rest, and which of them did not end well."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any

from memopt import _C
from memopt._run import ranks_folder
from memopt._run.ranks_folder import Place
from memopt._runtime.table import ResultTable, line_width, with_command

_ALIKE = 1.05  # times the median that the highest peak may be
_TOP = 5
_PAGES = 4  # recordings beside each other in a page
_REPORT = "report.html"

Rank = dict[str, Any]


def text(folder: str | Path, ranks: list[Rank] | None = None) -> str:
    """Return the report on one screen. Raises ValueError if the folder has no ranks' reports."""
    ranks = _loaded(folder) if ranks is None else ranks
    count, hosts = ranks[0]["ranks"], sorted({rank["host"] for rank in ranks})
    on = f" on {len(hosts)} nodes" if len(hosts) > 1 else ""
    program = next((rank["program"] for rank in ranks if "program" in rank), "")
    seconds = max((rank.get("seconds", 0.0) for rank in ranks), default=0.0)
    lines = [f"memopt run: {program} in {count} ranks{on}, {seconds:.1f} s: {_ended(ranks)}"]
    lines += _table(ranks, several_hosts=len(hosts) > 1).lines()
    return "\n".join([*lines, *_words(folder, ranks)])


def _words(folder: str | Path, ranks: list[Rank]) -> list[str]:
    """Return what is said below the table."""
    lines = []
    missing = sorted(set(range(ranks[0]["ranks"])) - {rank["rank"] for rank in ranks})
    if missing:
        lines.append(
            f"  {_names(missing)} left no recording in {folder}: they ran on another node, or never started"
        )
    lines += _planned(ranks)
    lines += _spread(ranks)
    lines += _troubles(ranks)
    if any((Path(folder) / f"rank{rank['rank']}.mopt").exists() for rank in ranks):
        where = _near(folder)
        command = f"python -m memopt report {shlex.quote(where)}"
        lines += with_command(f"recorded in {where}", command, line_width(sys.__stderr__))
    return lines


def first_words(outcome: Rank, place: Place) -> str:
    """Describe a rank that has failed while others run."""
    rank = {"rank": place.rank, "state": "ended", **outcome}
    head = (
        f"memopt run: rank {place.rank} of {place.count} {outcome['ended']} after {outcome['seconds']:.1f} s"
    )
    return "\n".join([head, *_troubles([rank])])


def as_dict(folder: str | Path) -> dict[str, Any]:
    """Return JSON-able values: each rank's outcome and figures, and which has the highest peak."""
    ranks = _loaded(folder)
    peaks = _peaks(ranks)
    return {
        "ranks": ranks,
        "highest_peak": max(peaks, key=lambda rank: peaks[rank], default=None),
        "median_peak": median_low(peaks.values()) if peaks else None,
        "ended_badly": [rank["rank"] for rank in ranks if _is_bad(rank)],
    }


def write_page(folder: str | Path, path: str | Path) -> None:
    """Write a page with the ranks' recordings side by side (of many ranks, those with the highest and lowest peaks),
    below the text. Raises ImportError without torch, ValueError if there is no recording."""
    ranks = _loaded(folder)
    peaks = _peaks(ranks)
    there = [rank for rank in peaks if (Path(folder) / f"rank{rank}.mopt").exists()]
    if not there:
        raise ValueError(f"{folder}: it holds no recording of a rank")
    from memopt._memory.html import report_page
    from memopt._memory.recording import recording_file

    there.sort(key=lambda rank: -peaks[rank])
    shown = there if len(there) <= _PAGES else [*there[: _PAGES - 1], there[-1]]
    recordings = [recording_file.load(Path(folder) / f"rank{rank}.mopt") for rank in shown]
    names = [f"rank {rank}" for rank in shown]
    title = next((rank["program"] for rank in ranks if "program" in rank), "ranks")
    table = _table(ranks, several_hosts=len({rank["host"] for rank in ranks}) > 1)
    first = report_page.section(
        "Ranks",
        report_page.folding_table(table.heads, table.rows, table.left)
        + report_page.folding_lines("\n".join([_ended(ranks), *_words(folder, ranks)])),
    )
    page = report_page.html(recordings, title=title, names=names, first=first)
    Path(path).write_text(page, encoding="utf-8")


def tell(folder: str | Path, say: Callable[[str], None]) -> None:
    """Report text(), then the path of the page, which is written beside the recordings if possible.

    This takes seconds, in which the process may be ended."""
    say(text(folder))
    try:
        write_page(folder, Path(folder) / _REPORT)
    except (ImportError, ValueError, OSError):  # the command that the text names says what is missing
        return
    say(f"  written: {_near(Path(folder) / _REPORT)}")


# ---- the parts ------------------------------------------------------------------------------------------------------


def _loaded(folder: str | Path) -> list[Rank]:
    ranks = ranks_folder.load(folder)
    if not ranks:
        raise ValueError(f"{folder}: there is no rank*.json of `memopt run` in it")
    return ranks


def _near(path: str | Path) -> str:
    """Return the path relative to the working directory if it is inside it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _peaks(ranks: list[Rank]) -> dict[int, int]:
    return {rank["rank"]: rank["figures"]["peak_bytes"] for rank in ranks if rank.get("figures")}


def _is_bad(rank: Rank) -> bool:
    return rank["state"] != "ended" or bool(rank.get("status", 0))


def _ended(ranks: list[Rank]) -> str:
    bad = [rank for rank in ranks if _is_bad(rank)]
    if not bad:
        return "all ended with 0"
    hows: dict[str, list[int]] = {}
    for rank in bad:
        hows.setdefault(rank.get("ended", "not ended yet"), []).append(rank["rank"])
    return "; ".join(f"{_names(numbers)}: {how.removeprefix('was ')}" for how, numbers in hows.items())


def _names(numbers: list[int]) -> str:
    """Return names such as "rank 3" or "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {joined}"


def _table(ranks: list[Rank], *, several_hosts: bool) -> ResultTable:
    size = _C.format_size
    heads = [
        "rank",
        *(["host"] if several_hosts else []),
        "device",
        "peak",
        "held",
        "host memory",
        "steps",
        "mostly",
    ]
    rows = []
    for rank in ranks:
        found = rank.get("figures") or {}
        categories = sorted(found.get("by_category", {}).items(), key=lambda item: -item[1])
        mostly = ", ".join(f"{size(bytes_)} {name}" for name, bytes_ in categories[:2] if bytes_)
        held = found.get("peak_reserved")
        rows.append(
            [
                str(rank["rank"]),
                *([rank["host"]] if several_hosts else []),
                found.get("device", "-"),
                size(found["peak_bytes"]) if found else "not recorded",
                size(held) if held else "-",
                size(rank["host_peak"]) if rank.get("host_peak") else "-",
                str(found.get("steps", (rank.get("progress") or {}).get("steps", "-"))),
                mostly,
            ]
        )
    return ResultTable(rows, heads, left=range(len(heads)))


def _planned(ranks: list[Rank]) -> list[str]:
    """Return each rank's peak beside its plan's, and what else is said of the plan by the first."""
    lines = []
    for n, rank in enumerate(rank for rank in ranks if rank.get("plan")):
        said = [line.strip() for line in rank["plan"]]
        lines += [f"  rank {rank['rank']}: {line}" for line in (said[:1] if n else said)]
    return lines


def _spread(ranks: list[Rank]) -> list[str]:
    """Spread of the peaks, and the lines of which the highest rank has more than the median rank."""
    size, peaks = _C.format_size, _peaks(ranks)
    if len(peaks) < 2:
        return []
    worst = max(peaks, key=lambda rank: peaks[rank])
    middle = median_low(sorted(peaks.values()))
    if peaks[worst] <= _ALIKE * middle:
        return [
            f"  the ranks are similar: the highest peak, of rank {worst}, is {_times(peaks[worst], middle)} the median"
        ]
    typical = next(rank for rank, peak in peaks.items() if peak == middle)
    lines = [
        f"  rank {worst} needs the most, {size(peaks[worst])}: {_times(peaks[worst], middle)} the median, "
        f"{size(middle)} of rank {typical}; the least is {size(min(peaks.values()))}. At its peak it has"
    ]
    figures = {rank["rank"]: rank["figures"] for rank in ranks if rank.get("figures")}
    for what in ("by_category", "by_line", "by_module"):
        lines += _more(figures[worst], figures[typical], what)
    if figures[worst]["steps"] and figures[worst]["peak_step"] != figures[typical]["peak_step"]:
        lines.append(
            f"    its peak is in step {figures[worst]['peak_step']}, that of rank {typical} in step "
            f"{figures[typical]['peak_step']}"
        )
    return lines


def _times(one: int, other: int) -> str:
    return f"{one / other:.2f} times" if other else "more than"


def _more(worst: Rank, typical: Rank, what: str) -> list[str]:
    """Return the largest differences in one grouping."""
    sides: list[dict[str, int]] = []
    for figures in (worst, typical):
        rows = figures[what]
        sides.append(rows if isinstance(rows, dict) else {_row(row): row["bytes"] for row in rows})
    grown = {name: bytes_ - sides[1].get(name, 0) for name, bytes_ in sides[0].items()}
    most = sorted((name for name in grown if name and grown[name] > 0), key=lambda name: -grown[name])[:_TOP]
    least = max((grown[name] for name in most), default=0) / 20  # what is less explains nothing
    return [
        f"    {'+' + _C.format_size(grown[name]):>10}  {what.removeprefix('by_')} {name}"
        for name in most
        if grown[name] >= least
    ]


def _row(row: dict[str, Any]) -> str:
    return f"{row['name']}  {row['text']:.60}".rstrip() if row["name"] else ""


def _troubles(ranks: list[Rank]) -> list[str]:
    lines = []
    for rank in ranks:
        name = f"rank {rank['rank']}"
        if rank["state"] != "ended":
            lines.append(
                f"  {name} (pid {rank['pid']} on {rank['host']}) has not reported how it ended: it is still running, "
                "or was killed together with the process that watched it"
            )
            continue
        about = [
            one.strip() for one in (*rank.get("of_a_signal", ()), rank.get("failure", "")) if one.strip()
        ]
        oom = (rank.get("figures") or {}).get("oom")
        if oom:
            about.insert(0, f"out of memory: {oom}")
        if rank.get("was_at"):
            about.append(f"it was at {', called by '.join(rank['was_at'][:3])} when it was killed")
        lines += [f"  {name}: {one}" for one in about]
    return lines
