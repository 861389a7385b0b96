"""A line on standard error's terminal that is rewritten in place, below everything else that is written."""

from __future__ import annotations

import os
import re
import sys

_ERASE = b"\r\x1b[K"
# One line down and up again, which makes room at the foot of the screen; the cursor's place kept; the line below.
_BELOW, _BACK = b"\x1bD\x1bM\x1b7\x1b[B\r\x1b[K", b"\x1b8"
_ERASE_BELOW = b"\x1b7\x1b[B\r\x1b[K\x1b8"
_STYLE = re.compile(rb"\x1b\[[0-9;]*[mK]")  # escapes that do not move the cursor


def is_terminal() -> bool:
    """Return whether standard error is a terminal that can rewrite a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class TerminalLine:
    """A line that draw(text) shows and draw("") takes off; write(data) writes what belongs above it.

    It stands where a line begins, or below a line that is itself rewritten, such as a progress bar. Behind any other
    unfinished line, such as a prompt, it is not shown.
    """

    def __init__(self) -> None:
        self._erase = b""  # what takes off the line that is shown
        self._shown = ""
        self._open = b""  # what was written since the last end of a line or return of the cursor
        self._returned = self._moved = False  # the cursor, since the last end of a line

    def draw(self, text: str) -> None:
        """Show the text, cut to the terminal's width."""
        if text != self._shown or (text and not self._erase):
            self._shown = text
            erase, self._erase = self._erase, b""
            self._send(self._drawn() or erase)

    def write(self, data: bytes) -> None:
        """Write data as it is."""
        below = self._erase == _ERASE_BELOW
        self._note(data)
        if below and b"\n" not in data and self._is_bar():
            self._send(data)  # the bar above the line changes, not the line
            return
        erase, self._erase = self._erase, b""
        # Below a bar the line comes by the next draw(): more of the bar may be on its way.
        self._send(erase + data + (self._drawn() if self._begins() else b""))

    def _drawn(self) -> bytes:
        """Return what draws the line where the cursor is, nothing where it is not shown."""
        line = self._shown[: _columns() - 1].encode()
        if line and self._begins():
            self._erase = _ERASE
            return _ERASE + line
        if line and self._is_bar():
            self._erase = _ERASE_BELOW
            return _BELOW + line + _BACK
        return b""

    def _send(self, data: bytes) -> None:
        sys.stderr.flush()
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()

    def _note(self, data: bytes) -> None:
        """Follow where the cursor is."""
        _, ended, rest = data.rpartition(b"\n")
        if ended:
            self._open, self._returned, self._moved = b"", False, False
        rest = _STYLE.sub(b"", self._open + rest)
        self._moved = self._moved or b"\x1b" in rest
        _, returned, self._open = rest.rpartition(b"\r")
        self._returned = self._returned or bool(returned)

    def _begins(self) -> bool:
        return not (self._open or self._returned or self._moved)

    def _is_bar(self) -> bool:
        if not self._returned or self._moved:
            return False
        try:
            return len(self._open.decode()) < _columns()
        except UnicodeDecodeError:  # a part of a character
            return False


def _columns() -> int:
    return os.get_terminal_size(sys.stderr.fileno()).columns or 80
