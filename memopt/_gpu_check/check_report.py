"""The report of `memopt gpu-check`: its JSON, its Markdown, and the comparison of two."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from memopt import _C

VERSION = 1  # of the JSON's form
Status = Literal["ok", "wrong", "slow", "not here"]


@dataclass(frozen=True)
class PartResult:
    """The result of a part.

    status: 'ok'; 'wrong' (a wrong result, or a part that ended by an error); 'slow'; 'not here' (the machine lacks
    what it checks). figures: numbers and texts by name. text: the reason, empty where it is ok.
    """

    part: str
    status: Status
    text: str = ""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckReport:
    """The results of all parts that were run. simulated: on the simulated device, whose times mean nothing."""

    parts: list[PartResult]
    simulated: bool

    @property
    def passed(self) -> bool:
        """Return whether nothing is wrong; what is slow or not here does not count."""
        return all(part.status != "wrong" for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "memopt": _C.__version__,
            "simulated": self.simulated,
            "passed": self.passed,
            "parts": [asdict(part) for part in self.parts],
        }

    def __str__(self) -> str:
        device = "the simulated device, whose times mean nothing" if self.simulated else "this machine's GPU"
        lines = [
            f"## memopt {_C.__version__} gpu-check on {device}",
            "",
            "| part | status | |",
            "| --- | --- | --- |",
        ]
        lines += [f"| {part.part} | {part.status} | {_cell(part.text)} |" for part in self.parts]
        for part in self.parts:
            if part.figures:
                lines += ["", f"### {part.part} ({part.seconds:.1f} s)", "", "| | |", "| --- | --- |"]
                lines += [
                    f"| {_cell(name)} | {_cell(_shown(value))} |" for name, value in part.figures.items()
                ]
        return "\n".join(lines)


def read(path: str) -> CheckReport:
    """The report that a file holds. Raises ValueError for a file that is no report of this version."""
    try:
        found = json.loads(Path(path).read_text())
        if found["version"] != VERSION:
            raise ValueError(
                f"{path} is a report of version {found['version']}; this memopt reads version {VERSION}"
            )
        return CheckReport([PartResult(**part) for part in found["parts"]], found["simulated"])
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not a report of `memopt gpu-check -o`") from None


def compared(first: CheckReport, second: CheckReport) -> str:
    """Both reports side by side, as Markdown: statuses, and the figures that differ, numbers by their ratio."""
    lines = ["| part | first | second |", "| --- | --- | --- |"]
    theirs = {part.part: part for part in second.parts}
    for mine in first.parts:
        other = theirs.pop(mine.part, None)
        lines.append(f"| {mine.part} | {mine.status} | {other.status if other else 'not run'} |")
        for name, value in mine.figures.items() if other else ():
            there = other.figures.get(name) if other else None
            if there != value:
                lines.append(f"| {_cell(name)} | {_cell(_shown(value))} | {_cell(_beside(value, there))} |")
    lines += [f"| {part.part} | not run | {part.status} |" for part in theirs.values()]
    return "\n".join(lines)


def _beside(value: float | str, other: float | str | None) -> str:
    if other is None:
        return "none"
    if isinstance(value, str) or isinstance(other, str) or not value:
        return _shown(other)
    return f"{_shown(other)} ({other / value:.2f}×)"


def _shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
