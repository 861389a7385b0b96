"""Tables of results: text for a terminal, HTML for a notebook."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 118  # characters of a line, at most
_NAME = 10  # characters of a fact's name


class Html(str):
    """A cell that is markup already."""


class Code(str):
    """A cell of source."""


@dataclass(frozen=True)
class ResultTable:
    """Rows of text. left: numbers of the columns that are aligned to the left; the others are to the right."""

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    left: Sequence[int] = (0,)

    def lines(self, indent: str = "  ", gap: str = "  ") -> list[str]:
        """Return the heads, if there are any, and the rows as lines of text."""
        rows = [*([self.heads] if self.heads else []), *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            indent
            + gap.join(
                cell.ljust(width) if n in self.left else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def html(self) -> str:
        """Return static HTML: no script, and no style except that of its cells."""
        heads = "".join(f"<th>{escape(head)}</th>" for head in self.heads)
        body = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        return f"<table>{heads and f'<thead><tr>{heads}</tr></thead>'}<tbody>{body}</tbody></table>"

    def _cells(self, row: Sequence[str]) -> str:
        tags = ["<td style='text-align:left'>" if n in self.left else "<td>" for n in range(len(row))]
        return "".join(f"{tag}{_markup(cell)}</td>" for tag, cell in zip(tags, row, strict=True))


@dataclass(frozen=True)
class Facts:
    """A headline, and below it names with a sentence each; the name "" continues the one before."""

    headline: str
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
        lines = [self.headline]
        for name, value in self.rows:
            begin, further = f"  {name:<{_NAME}} ", " " * (_NAME + 3)
            if isinstance(value, Code):  # cut, not folded
                lines.append(f"{begin}{value}"[:width])
            else:
                lines += textwrap.wrap(
                    value, width, initial_indent=begin, subsequent_indent=further, break_long_words=False
                )
        return "\n".join(lines)

    def html(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{_markup(value)}</td></tr>"
            for name, value in self.rows
        )
        return f"<table><caption>{escape(self.headline)}</caption>{cells}</table>"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def several(name: str, values: Iterable[str]) -> list[tuple[str, str]]:
    """Return rows of Facts with several values under one name."""
    return [(name if n == 0 else "", value) for n, value in enumerate(values)]


def paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{_markup(text)}</p>" for text in texts)


def _markup(cell: str) -> str:
    if isinstance(cell, Html):
        return cell
    return f"<code>{escape(cell)}</code>" if isinstance(cell, Code) else escape(cell)
