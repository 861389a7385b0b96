"""The output of a process that writes to a file, forwarded line by line as it comes.

A file is used and not a pipe: the process never waits for a reader, and a child that outlives it keeps nobody waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_INTERVAL = 0.1  # seconds


class Followed:
    """A context that forwards output while the block runs, and what is left afterwards."""

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
