"""Progress of an estimate on standard error, with the script's own output, each line of it labelled.

On a terminal it is one line that changes, drawn by rich if that is installed; elsewhere a line for each phase, if lines
are wanted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from memopt._runtime.log import logger
from memopt._runtime.terminal_line import TerminalLine, is_terminal

_LABEL = "script| "


class Progress:
    """The display of progress; say(text) shows what has begun.

    enabled: without it nothing is shown. command: memopt's, whose progress it is. lines: without a terminal, show a
    line for each phase; else phases go to memopt's log alone, which -v shows.
    """

    def __init__(self, enabled: bool = True, command: str = "estimate", *, lines: bool = False) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        terminal = enabled and is_terminal()
        self._lines = enabled and lines and not terminal
        self._rich = _rich_status() if terminal else None
        self._line = TerminalLine() if terminal and self._rich is None else None

    def __enter__(self) -> Progress:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._rich is not None:
                self._rich.stop()
            if self._line is not None:
                self._line.draw("")

    def say(self, text: str) -> None:
        """A phase has begun."""
        line = f"memopt {self._command}: {text}"
        with self._lock:
            if self._lines:
                print(line, file=sys.stderr, flush=True)
                return
            logger.info("%s: %s (%.1f s)", self._command, text, time.monotonic() - self._begun)
            if self._rich is not None:
                from rich.text import Text

                self._rich.update(Text(line))
            if self._line is not None:
                self._line.draw(line)

    def script(self, line: str) -> None:
        """Print a line that the script has written, above the progress."""
        with self._lock:
            if self._rich is not None:
                from rich.text import Text

                self._rich.console.print(Text(_LABEL + line))
                return
            if self._line is not None:
                self._line.write(f"{_LABEL}{line}\n".encode())
                return
            print(_LABEL + line, file=sys.stderr, flush=True)


def _rich_status() -> Any:
    """Return rich's status, None if rich is not installed (pip install 'memopt[progress]')."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True).status("")


# ---- the script's output ---------------------------------------------------------------------------------------------


_INTERVAL = 0.1  # seconds


class Followed:
    """A context that forwards the output of a process that writes to a file, line by line as it comes.

    A file is used and not a pipe: the process never waits for a reader, and a child that outlives it keeps nobody
    waiting.
    """

    def __init__(self, path: str | Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._rest = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Followed:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        with open(self._path, "rb") as file:
            while True:
                last = self._ended.is_set()  # before reading: what is written when it is set is read
                *lines, self._rest = (self._rest + file.read()).split(b"\n")
                for line in lines:
                    self._tell(_last_state(line))
                if last:
                    break
                self._ended.wait(_INTERVAL)
        if self._rest:
            self._tell(_last_state(self._rest))


def _last_state(line: bytes) -> str:
    """Return the final state of a line that was overwritten repeatedly, such as a progress bar's."""
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1].decode(errors="replace") if states else ""
