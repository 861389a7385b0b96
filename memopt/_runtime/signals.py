"""Signals that wait until what must not be left half done is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_later(*, fatal: bool = True) -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block is over. (Python handles them in the main thread alone.)

    fatal: Also where Python does not handle them, so that they end the process or call a handler in C. Such a handler
    is not put back, since Python knows of none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if fatal or callable(signal.getsignal(n))]
    before = {number: signal.signal(number, lambda *heard: came.append(heard)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for heard, frame in came:
            handler = before[signal.Signals(heard)]
            if callable(handler):
                handler(heard, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(heard)
