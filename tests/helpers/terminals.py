"""A program on a pseudo-terminal, and what its screen shows in the end."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_in_terminal(
    command: list[str],
    seen: Callable[[bytes, Callable[[bytes], object]], None] = lambda output, press: None,
    columns: int = 80,
    **options: Any,
) -> tuple[int, bytes]:
    """Run a command with a terminal of its own; return its status and what it wrote there.

    seen(output, press) is called whenever there is more output; press(keys) types. options: subprocess.Popen's, such as
    a stdout or stderr that is not the terminal."""
    leader, follower = os.openpty()
    termios.tcsetwinsize(leader, (24, columns))
    options["env"] = options.get("env", os.environ) | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    process = subprocess.Popen(
        command,
        **{"stdin": follower, "stdout": follower, "stderr": follower} | options,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(follower)
    output = b""
    try:
        while part := os.read(leader, 1 << 16):
            output += part
            seen(output, lambda keys: os.write(leader, keys))
    except OSError:  # the other end is closed
        pass
    finally:
        process.wait(timeout=600)
        os.close(leader)
    return process.returncode, output


_PIECE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b([78DM])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """A terminal's screen that knows what memopt writes to one, and fails at anything else."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.past: list[str] = []  # lines that were moved out at the top
        self.lines = [""] * rows
        self.row = self.column = 0
        self._kept = 0, 0

    def show(self, output: bytes | str) -> Screen:
        text = output.decode() if isinstance(output, bytes) else output
        at = 0
        while at < len(text):
            piece = _PIECE.match(text, at)
            assert piece, f"the screen does not know {text[at : at + 12]!r}"
            self._piece(*piece.groups())
            at = piece.end()
        return self

    def _piece(
        self, number: str | None, code: str | None, escape: str | None, move: str | None, text: str
    ) -> None:
        if text:
            self._write(text)
        elif move == "\r":
            self.column = 0
        elif move == "\n" or escape == "D":
            self._down()
        elif escape == "M":
            self.row -= 1
        elif escape == "7":
            self._kept = self.row, self.column
        elif escape == "8":
            self.row, self.column = self._kept
        elif code == "B":
            self.row = min(self.row + 1, self.rows - 1)
        elif code == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        else:
            assert code == "m", f"the screen does not know {code or escape!r}"

    def _down(self) -> None:
        if self.row == self.rows - 1:
            self.past.append(self.lines.pop(0))
            self.lines.append("")
        else:
            self.row += 1

    def _write(self, text: str) -> None:
        for letter in text:
            if self.column == self.columns:
                self.column = 0
                self._down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1

    @property
    def text(self) -> str:
        """All lines, without the empty ones at the end."""
        return "\n".join([*self.past, *self.lines]).rstrip("\n")
