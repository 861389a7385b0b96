"""Two recordings side by side: what the second holds more or less of at its peak, by category, line and module."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memopt import _C
from memopt.profiling.recording import Line, Recording

_TOP = 10


@dataclass(frozen=True)
class Change:
    """Bytes of one category, line or module at the peak of either."""

    name: str
    before: int
    after: int
    text: str = ""

    @property
    def more(self) -> int:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Each list by how much it changed, the most first; what did not change is left out of it."""

    before: Change
    by_category: list[Change]
    by_line: list[Change]
    by_module: list[Change]

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
                    lines.append(f"    {_signed(sum(c.more for c in rest)):>10}  in {len(rest)} more")
        if not self.by_category:
            lines.append("  at their peaks, the same")
        return "\n".join(lines)


def compare(a: Recording, b: Recording) -> Comparison:
    """Lines are taken for the same by file and text, where their files are here, else by file and number: so what moved
    because something was written above it is no change."""
    categories = b.by_category()
    return Comparison(
        Change("peak", a.peak()[0], b.peak()[0]),
        _changed([Change(name, size, categories[name]) for name, size in a.by_category().items()]),
        _changes(a.by_line(), b.by_line()),
        _changes(a.by_module(), b.by_module()),
    )


def _changes(a: list[Line], b: list[Line]) -> list[Change]:
    sums: dict[tuple[str, str], list[int]] = {}
    names: dict[tuple[str, str], str] = {}
    for side, rows in enumerate((a, b)):
        for row in rows:
            key = (row.name.partition(":")[0], row.text) if row.text else (row.name, "")
            names[key] = row.name or "unknown"
            sums.setdefault(key, [0, 0])[side] += row.bytes
    return _changed([Change(names[key], sizes[0], sizes[1], key[1]) for key, sizes in sums.items()])


def _changed(changes: list[Change]) -> list[Change]:
    return sorted((change for change in changes if change.more), key=lambda change: -abs(change.more))


def _signed(size: int) -> str:
    return ("+" if size >= 0 else "-") + _C.format_size(abs(size))


def _rows(changes: list[Change]) -> list[str]:
    width = max(len(change.name) for change in changes)
    size = _C.format_size
    return [
        f"    {_signed(change.more):>10}  {change.name:<{width}}  {size(change.before)} -> {size(change.after)}"
        f"  {change.text:.50}".rstrip()
        for change in changes
    ]
