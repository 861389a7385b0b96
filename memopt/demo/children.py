"""The demo's processes, heard side by side: each line that one tells is an event here."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

from memopt.estimation.child_process import command

_SAID = 20  # lines of a failed child's output that an error shows
_WAKES = 0.2  # seconds; a wait without an end would not hear Ctrl-C everywhere


class Event(NamedTuple):
    """What a child told; kind "exit" is this side's own, of one that has ended: status, and what it wrote at last."""

    name: str
    kind: str
    what: dict[str, Any]


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C and a request to end take effect when the block is over. In the main thread, where Python hears them."""
    came: list[tuple[int, FrameType | None]] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
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


class Children:
    """Leaving the block ends those that still run, and whatever they have started."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(
        self, name: str, module: str, request: str, *, threads: int | None = None, python: str | None = None
    ) -> None:
        """`python -m module request`, of this very memopt. In a session of its own: Ctrl-C is the parent's alone."""
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (the hearing thread's)
        with _interrupted_later():  # between its start and the next line nobody would end it
            process = subprocess.Popen(
                command(python or sys.executable, module, request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._processes[name] = process
        threading.Thread(target=self._hear, args=(name, process, errors), daemon=True).start()

    def _hear(self, name: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        assert process.stdout is not None
        said: list[str] = []
        with process.stdout, errors:
            for line in process.stdout:
                try:
                    told = json.loads(line)
                    self._events.put(Event(name, told.pop("kind"), told))
                except (ValueError, KeyError, AttributeError):
                    said.append(line.rstrip())
            status = process.wait()
            errors.seek(0)
            said += errors.read().splitlines()
        self._events.put(Event(name, "exit", {"status": status, "said": "\n".join(said[-_SAID:])}))

    def next(self) -> Event:
        while True:
            try:
                return self._events.get(timeout=_WAKES)
            except queue.Empty:
                continue
