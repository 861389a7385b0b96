"""Comparison of two recordings at their peaks: differences by category, line and module."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memopt import _C
from memopt._memory.recording.recording import Line, Recording
from memopt._runtime.table import ResultTable

_TOP = 10


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
                lines += [f"  {title}:", *_rows(changes[:_TOP])]
                if len(changes) > _TOP:
                    rest = changes[_TOP:]
                    lines.append(f"    and {_signed(sum(c.more for c in rest))} in {len(rest)} more")
        if not self.by_category:
            lines.append("  at their peaks, the same")
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
