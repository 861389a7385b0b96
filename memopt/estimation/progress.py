"""What is being done, on standard error, while children run: one line by rich where there is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from memopt.log import logger


class Progress:
    """say(text) tells what has begun. Without a terminal, or without rich (pip install 'memopt[progress]'), it goes to
    memopt's log alone, which -v shows."""

    def __init__(self, enabled: bool = True) -> None:
        self._status: Any = None
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        if enabled and sys.stderr.isatty():
            try:
                from rich.console import Console
            except ImportError:
                logger.info(
                    "rich is not installed, so there is no progress line: pip install 'memopt[progress]'"
                )
            else:
                self._status = Console(stderr=True).status("")

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        logger.info("estimate: %s (%.1f s)", text, time.monotonic() - self._begun)
        with self._lock:
            if self._status is not None:
                self._status.update(f"memopt estimate: {text}")
