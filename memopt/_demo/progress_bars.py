"""Progress bars in one line of a terminal; silent if standard error is none."""

from __future__ import annotations

import shutil
import sys
import time

_CELLS = 12
_REDRAWN = 0.1  # seconds


class ProgressBars:
    """set(name, text) and set(name, text, done, of) draw; done(name) takes one off; the block's end clears the line."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._bars: dict[str, str] = {}
        self._drawn = 0.0

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def set(self, name: str, text: str, done: int = 0, of: int = 0) -> None:
        new = name not in self._bars
        if of:
            full = _CELLS * done // of
            text = f"{'█' * full}{'░' * (_CELLS - full)} {done}/{of} {text}"
        self._bars[name] = text
        self._draw(new or done == of)

    def done(self, name: str) -> None:
        self._bars.pop(name, None)
        self._draw(True)

    def _draw(self, now: bool) -> None:
        if not self._shown or not (now or time.monotonic() - self._drawn >= _REDRAWN):
            return
        self._drawn = time.monotonic()
        line = "   ".join(f"{name} {bar}" for name, bar in self._bars.items())
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
