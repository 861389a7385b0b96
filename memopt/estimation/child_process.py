"""One child process an answer: started, heard, and ended together with whatever it has started itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from memopt.estimation.answer import Answer
from memopt.estimation.request import Request
from memopt.estimation.script_output import Followed
from memopt.running import library_noise

# A child that does not keep its own limit is ended so many seconds later.
_GRACE = 30.0
_PATIENCE = 10.0  # in which a child that was told to end does
_SAID = 20  # lines of a silent child's output that an error shows
# Loads this very memopt in any interpreter, whatever is installed there, and nothing else of what is installed here.
_BOOTSTRAP = """\
import importlib.util, runpy, sys
home, module, request = sys.argv[1:]
spec = importlib.util.spec_from_file_location("memopt", home + "/__init__.py", submodule_search_locations=[home])
package = sys.modules["memopt"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
sys.argv = [module, request]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
CHILD = "memopt.estimation.child"


class ChildFailed(RuntimeError):
    """The child gave no answer. The message says how it ended; `output` is the end of what it wrote, where that was not
    shown."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(f"{text}\n{output}" if output else text)
        self.output = output


def command(python: str, module: str, request: str) -> list[str]:
    home = str(Path(__file__).resolve().parents[1])
    return [python, "-c", _BOOTSTRAP, home, module, request]


class Children:
    """Runs children, from several threads if need be. Leaving the block ends those that still run. tell: is given what
    a shown script writes, line by line; noise: what libraries say when they are imported is heard too."""

    def __init__(
        self, python: str | None = None, tell: Callable[[str], None] | None = None, *, noise: bool = False
    ) -> None:
        self.python = python or sys.executable
        self._tell, self._noise = tell, noise
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._closed = False

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            for pid in self._running:
                _end(pid)

    def run(self, request: Request, *, show: bool = False, recording: str | None = None) -> Answer:
        """The answer to a request. `show`: what the script writes is told, else it goes nowhere, unless there is no
        answer: then the end of it is in the ChildFailed."""
        with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
            home = Path(folder).resolve()
            answer, asked, said = home / "answer.json", home / "request.json", home / "output"
            recorded = None if recording is None else str(home / "recording.mopt")
            asked.write_text(json.dumps(asdict(replace(request, answer=str(answer), recording=recorded))))
            show = show and self._tell is not None
            with open(said, "wb") as output, contextlib.ExitStack() as followed:
                if show and self._tell is not None:
                    followed.enter_context(Followed(said, self._tell))
                status = self._status(command(self.python, CHILD, str(asked)), output, request.seconds)
            try:
                told = json.loads(answer.read_text())
            except (OSError, ValueError):
                text = "" if show else _tail(said)
                raise ChildFailed(
                    f"the estimate's child process {_ended(status)} without an answer", text
                ) from None
            if recording is not None and recorded is not None and Path(recorded).exists():
                shutil.copyfile(recorded, recording)
            result = Answer.from_json(told)
            if result.failed and not show:
                result.more["output"] = _tail(said)
            return result

    def _environment(self) -> dict[str, str]:
        told = dict(os.environ) if self._noise else library_noise.without(os.environ)
        return {
            "PYTHONUNBUFFERED": "1",
            **told,
        }  # what a script prints comes when it does, between its errors

    def _status(self, line: list[str], output: Any, seconds: float | None) -> int:
        with self._lock:
            if self._closed:
                raise ChildFailed("the estimate was ended")
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._environment(),
            )
            self._running.add(process.pid)
        try:
            _await(process.pid, None if seconds is None else seconds + _GRACE)
        finally:
            # Until it is reaped its number is nobody else's: what ends here is its own.
            _end(process.pid)
            with self._lock:
                self._running.discard(process.pid)
            process.wait()
        return process.returncode


def _await(pid: int, seconds: float | None) -> None:
    """Until the process has ended, which is left to be reaped, or so many seconds are over."""
    if seconds is None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < end:
        time.sleep(0.02)


def _end(pid: int) -> None:
    """It ends what it has started (descendants.py), then itself; where it does not, its group goes with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.kill(pid, signal.SIGTERM)
        _await(pid, _PATIENCE)
        os.killpg(pid, signal.SIGKILL)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = " (is the host's memory used up?)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def _tail(path: Path) -> str:
    lines = path.read_bytes().decode(errors="replace").splitlines()
    return "\n".join(lines[-_SAID:])
