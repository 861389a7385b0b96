"""A line that is rewritten in place, below what else is written."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace

import pytest
from terminals import Screen

from memopt._runtime import terminal_line
from memopt._runtime.terminal_line import TerminalLine


class Terminal:
    """Standard error on a terminal of 40 columns and so many rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.buffer = io.BytesIO()
        self.rows = rows
        monkeypatch.setattr(terminal_line, "sys", SimpleNamespace(stderr=self))
        monkeypatch.setattr(terminal_line, "_columns", lambda: 40)

    def flush(self) -> None:
        pass

    @property
    def text(self) -> str:
        raw = self.buffer.getvalue().replace(b"\n", b"\r\n")  # as a terminal turns them
        return Screen(40, self.rows).show(raw).text


@pytest.fixture(params=[3, 24])
def terminal(request, monkeypatch):
    return Terminal(monkeypatch, request.param)


def test_the_line_is_last_and_the_rest_is_as_without_it(terminal):
    line = TerminalLine()
    line.draw("one")
    line.write(b"first\nsecond\n")
    assert terminal.text == "first\nsecond\none"
    line.draw("the line is cut at the width of the terminal")
    assert terminal.text == "first\nsecond\nthe line is cut at the width of the ter"
    line.write("third \u00e9\n".encode())
    line.draw("")
    assert terminal.text == "first\nsecond\nthird \u00e9"


def test_a_progress_bar_stays_above_it(terminal):
    line = TerminalLine()
    line.write(b"begin\n")
    line.draw("live 1")
    line.write("\r 5% \u2588".encode())
    line.draw("live 2")
    assert terminal.text == "begin\n 5% \u2588\nlive 2"
    line.write("\r10% \u2588\u2588".encode())
    assert terminal.text == "begin\n10% \u2588\u2588\nlive 2"
    line.draw("live 3")
    line.write(b"\n")
    line.write(b"end\n")
    assert terminal.text == "begin\n10% \u2588\u2588\nend\nlive 3"
    line.write(b"20% \r")
    line.draw("live 4")
    assert terminal.text == "begin\n10% \u2588\u2588\nend\n20% \nlive 4"
    line.draw("")
    line.write(b"\x1b[K25%\n")
    assert terminal.text == "begin\n10% \u2588\u2588\nend\n25%"


@pytest.mark.parametrize("unfinished", [b"name? ", b"\r two bars\x1b[A", "half \u00e9".encode()[:-1]])
def test_it_waits_where_a_line_is_not_finished(terminal, unfinished):
    line = TerminalLine()
    line.draw("live")
    line.write(unfinished)
    before = terminal.buffer.getvalue()
    line.draw("live 2")
    assert terminal.buffer.getvalue() == before and before.endswith(unfinished)
    line.write(b"\n")
    assert terminal.buffer.getvalue().endswith(b"live 2")


def test_whatever_pieces_the_output_comes_in_the_screen_ends_the_same(terminal):
    draw = random.Random(5)
    whole = "".join(
        draw.choice(["line\n", "\r 7% \u2588\u2588", "\n", "\x1b[31mred\x1b[0m\n", "no end", "\r\x1b[K"])
        for _ in range(200)
    ).encode()
    line, at = TerminalLine(), 0
    while at < len(whole):
        size = draw.randrange(1, 9)
        line.write(whole[at : at + size])
        at += size
        line.draw(f"live {draw.randrange(1000)}")
    line.draw("")
    alone = Screen(40, terminal.rows).show(whole.replace(b"\n", b"\r\n"))
    assert terminal.text == alone.text
