"""Tables of results: text for a terminal, HTML for a notebook."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TextIO

WIDTH = 118  # characters of a line, at most
_NAME = 10  # characters of a fact's name
_NO_SPACE = "\0"  # in the place of a space at which no line ends
_LEAST = 24  # characters of a table's last column that is folded


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

    def lines(self, indent: str = "  ", gap: str = "  ", width: int = 0, whole: int = 0) -> list[str]:
        """Return the heads, if there are any, and the rows as lines of text.

        With a width the last column is folded so that lines have at most that, and if it has too little room for
        that, each row is a sentence of its cells, each but the first behind its head. With `whole`, lines are cut at
        the width instead, but not in their first columns, of that number."""
        rows = [*([self.heads] if self.heads else []), *self.rows]
        if width and rows and not whole:
            others = list(zip(*rows, strict=True))[:-1]
            room = width - len(indent) - sum(max(map(len, column)) + len(gap) for column in others)
            if room < min(_LEAST, max(len(row[-1]) for row in rows)):
                names = ["", *self.heads[1:]] if self.heads else [""] * len(rows[0])
                named = [zip(names, row, strict=True) for row in self.rows]
                return [indent + "; ".join(f"{name} {cell}".strip() for name, cell in row) for row in named]
            empty = [""] * len(others)
            folded = [(row, folded_lines(row[-1], room) or [""]) for row in rows]
            rows = [
                [*(empty if n else row[:-1]), part] for row, parts in folded for n, part in enumerate(parts)
            ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            indent
            + gap.join(
                cell.ljust(width) if n in self.left else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        if not (width and whole):
            return lines
        least = len(indent) + sum(widths[:whole]) + len(gap) * (whole - 1)
        return [_cut(line, width, least) for line in lines]

    def html(self) -> str:
        """Return static HTML: no script, and no style except that of its cells."""
        heads = "".join(f"<th>{escape(head)}</th>" for head in self.heads)
        body = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        return f"<table>{heads and f'<thead><tr>{heads}</tr></thead>'}<tbody>{body}</tbody></table>"

    def _cells(self, row: Sequence[str]) -> str:
        tags = ["<td style='text-align:left'>" if n in self.left else "<td>" for n in range(len(row))]
        return "".join(f"{tag}{markup(cell)}</td>" for tag, cell in zip(tags, row, strict=True))


@dataclass(frozen=True)
class Facts:
    """A headline, and below it names with a sentence each; the name "" continues the one before."""

    headline: str
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        width = line_width()
        lines = folded_headline(self.headline, width)
        for name, value in self.rows:
            begin, further = f"  {name:<{_NAME}} ", " " * (_NAME + 3)
            if isinstance(value, Code):  # as it is: folded, it would not be what can be read
                lines.append(f"{begin}{value}")
            else:
                lines += folded_lines(value, width, begin, further)
        return "\n".join(lines)

    def html(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{markup(value)}</td></tr>"
            for name, value in self.rows
        )
        return f"<table><caption>{escape(self.headline)}</caption>{cells}</table>"


def folded_lines(text: str, width: int, begin: str = "", further: str = "") -> list[str]:
    """Return text in lines of `width`, divided at spaces alone, and not within `a command`.

    A path, an option or a command stays whole, however long."""
    lines = textwrap.wrap(
        re.sub("`[^`]*`", lambda command: command[0].replace(" ", _NO_SPACE), text),
        width,
        initial_indent=begin,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_SPACE, " ") for line in lines]


def folded_headline(text: str, width: int) -> list[str]:
    """Return a first line, which is folded on a narrow terminal alone: else programs look for it, too."""
    return folded_lines(text, width, further="  ") if width < WIDTH else [text]


def with_command(text: str, command: str, width: int) -> list[str]:
    """Return "  text: command"; where that has no room, the command has a line of its own, however long."""
    line = f"  {text}: {command}"
    return (
        [line] if len(line) <= width else [*folded_lines(f"{text}:", width, "  ", "    "), f"    {command}"]
    )


def line_width(stream: TextIO | None = None) -> int:
    """Return the characters that a line has on the terminal of a stream, standard output by default."""
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal():
        try:
            columns = str(os.get_terminal_size((stream or sys.__stdout__).fileno()).columns)  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):  # no terminal, closed, or none at all
            columns = ""
    return min(WIDTH, int(columns or 0) or WIDTH)


def _cut(line: str, width: int, least: int) -> str:
    """Return the beginning of a line, at least so many characters, with "…" unless it ends where a cell does."""
    if len(line) <= width:
        return line
    end = max(width - 1, least)
    return line[:end].rstrip() + ("" if "  " in line[max(0, end - 2) : end + 2] else "…")


def room_of_a_fact() -> int:
    """Return the characters that a line of Facts has beside the name."""
    return line_width() - _NAME - 3


def counted(number: int, name: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{number} {name}{'s' * (number != 1)}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def several(name: str, values: Iterable[str]) -> list[tuple[str, str]]:
    """Return rows of Facts with several values under one name."""
    return [(name if n == 0 else "", value) for n, value in enumerate(values)]


def paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{markup(text)}</p>" for text in texts)


def markup(cell: str) -> str:
    """Return a cell as HTML."""
    if isinstance(cell, Html):
        return cell
    return f"<code>{escape(cell)}</code>" if isinstance(cell, Code) else escape(cell)
