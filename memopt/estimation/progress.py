"""What is being done, on standard error, while children run, and what the script itself writes, each line labelled: one
line that changes where there is a terminal, by rich if that is there; else a line for each phase, where lines are
wanted."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from memopt.log import logger

_LABEL = "script| "
_ERASE = "\r\x1b[K"


class Progress:
    """say(text) tells what has begun. enabled: nothing is shown without. lines: where there is no terminal, a line for
    each phase; without, it goes to memopt's log alone, which -v shows."""

    def __init__(self, enabled: bool = True, *, lines: bool = False) -> None:
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        terminal = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = enabled and lines and not terminal
        self._rich = _rich_status() if terminal else None
        self._plain = terminal and self._rich is None
        self._now = ""  # the plain line

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
            self._draw("")

    def say(self, text: str) -> None:
        """A phase has begun."""
        line = f"memopt estimate: {text}"
        with self._lock:
            if self._lines:
                print(line, file=sys.stderr, flush=True)
                return
            logger.info("estimate: %s (%.1f s)", text, time.monotonic() - self._begun)
            if self._rich is not None:
                from rich.text import Text

                self._rich.update(Text(line))
            self._draw(line)

    def script(self, line: str) -> None:
        """A line that the script has written, above what is said."""
        with self._lock:
            if self._rich is not None:
                from rich.text import Text

                self._rich.console.print(Text(_LABEL + line))
                return
            now = self._now
            self._draw("")
            print(_LABEL + line, file=sys.stderr, flush=True)
            self._draw(now)

    def _draw(self, line: str) -> None:
        if self._plain and line != self._now:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(_ERASE + line[: width - 1])
            sys.stderr.flush()
            self._now = line


def _rich_status() -> Any:
    """None where rich is not installed (pip install 'memopt[progress]')."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True).status("")
