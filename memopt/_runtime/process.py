"""Child processes: a module of memopt in a fresh interpreter, in a session of its own, so that Ctrl-C is the parent's
alone, and ended with whatever it has started.

A child gets requests on its standard input and answers on its standard output, each a line of JSON; what it prints
itself goes to its output, as standard error does. This module imports no torch: a child may have to prepare the process
before that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from memopt._runtime.signals import interrupted_later

_LEAVING = 10.0  # seconds in which a child ends that has said all, or was told to
_LOOK = 0.2  # seconds; a wait without an end would not hear Ctrl-C everywhere
_TAIL = 1 << 16  # bytes of a child's output in which its last lines are looked for
# Loads this very memopt in any interpreter, whatever is installed there, and nothing else of what is installed here.
_BOOTSTRAP = """\
import importlib.util, json, runpy, sys
home, module, paths, *arguments = sys.argv[1:]
sys.path[:] = json.loads(paths) or sys.path
spec = importlib.util.spec_from_file_location("memopt", home + "/__init__.py", submodule_search_locations=[home])
package = sys.modules["memopt"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class ChildFailed(RuntimeError):
    """The child gave no answer. The message says how it ended; `output` is the end of what it wrote, where that was not
    shown; `status`: None where it was not waited for."""

    def __init__(self, text: str, output: str = "", status: int | None = None) -> None:
        super().__init__(f"{text}\n{output}" if output else text)
        self.output, self.status = output, status


class GivenUp(Exception):
    """The block of the children was left while a thread waited for one of them, or was about to start it."""


class Message(NamedTuple):
    """A line that a child has told."""

    kind: str
    what: dict[str, Any]


def command(python: str | None, module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module arguments` with this very memopt. python: None for this interpreter, with
    this process's import paths."""
    home = str(Path(__file__).resolve().parents[1])
    paths = [] if python else [path for path in sys.path if isinstance(path, str)]
    return [python or sys.executable, "-c", _BOOTSTRAP, home, module, json.dumps(paths), *arguments]


def ended(status: int) -> str:
    """Describe an exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = " (has the host run out of memory?)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


class Children:
    """Child processes, which several threads may start. Leaving the block ends those that still run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Child] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        for child in self._running:
            child.end()

    def start(
        self,
        module: str,
        *arguments: str,
        request: Any = None,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a module of memopt. request: its first. environment: all of it; None: this process's."""
        line = command(python, module, *arguments)
        with self._lock, interrupted_later():  # between its start and the next line nobody would end it
            if self._closed:
                raise GivenUp
            child = Child(line, environment)
            self._running.append(child)
        child.send(request)
        return child


class Child:
    """A process that Children.start() made."""

    def __init__(self, line: list[str], environment: Mapping[str, str] | None) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._said: list[str] = []
        self._messages: deque[Message] = deque()
        self._rest, self._silent = b"", False
        self._ending = threading.Lock()
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            self._output.close()
            raise
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._stdout = self._process.stdout.fileno()

    def send(self, request: Any) -> None:
        """Send another request. If the child has ended, hear() reports it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            rest = memoryview(json.dumps(request).encode() + b"\n")
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def hear(self, seconds: float | None = None) -> Message | None:
        """Return its next message, None once it has ended. Raises TimeoutError after so many seconds."""
        return hear([self], seconds)[1]

    def __iter__(self) -> Iterator[Message]:
        while (message := self.hear()) is not None:
            yield message

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or for so many seconds."""
        end = time.monotonic() + seconds
        while not self.is_over() and time.monotonic() < end:
            time.sleep(0.02)

    def end(self) -> int:
        """End it, and return its status.

        It is asked to end first, so that it can end processes that have left its group (_estimate/protection.py); then
        its group is killed."""
        with self._ending:
            if self._process.returncode is None:
                # Until it is reaped its number is nobody else's: what ends here is its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
                    os.kill(self.pid, signal.SIGTERM)
                    self.wait(_LEAVING)
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
                self._said = _last_lines(self._output)
                for file in (self._process.stdin, self._process.stdout, self._output):
                    if file is not None:
                        file.close()
        return self._process.returncode

    def said(self, lines: int = 20) -> str:
        """End it, and return the last lines of its output."""
        self.end()
        return "\n".join(self._said[-lines:])

    def is_over(self) -> bool:
        """Return whether it has ended; it is not reaped."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        return True

    def _read(self) -> None:
        part = b""
        with contextlib.suppress(OSError):  # another thread has ended it, which closes this
            part = os.read(self._stdout, 1 << 16)
        self._silent = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            try:
                told = json.loads(line)
                self._messages.append(Message(told.pop("kind"), told))
            except (ValueError, KeyError, AttributeError, TypeError):  # what something before it has printed
                os.write(self._output.fileno(), line + b"\n")


def _last_lines(output: IO[bytes]) -> list[str]:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
    return output.read().decode(errors="replace").splitlines()


def last_lines(output: Path, lines: int = 20) -> str:
    """Return the last lines of a file that a child has written."""
    with open(output, "rb") as file:
        return "\n".join(_last_lines(file)[-lines:])


def hear(children: Sequence[Child], seconds: float | None = None) -> tuple[Child, Message | None]:
    """Return the next message of any of these children, and the child; None from one that has ended.

    Raises TimeoutError after so many seconds."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        for child in children:
            if child._messages:
                return child, child._messages.popleft()
            if child._silent or child._process.returncode is not None:
                child.wait(_LEAVING)
                return child, None
        over = [child for child in children if child.is_over()]  # before the look, for what it said last
        ready = wait([child._stdout for child in children], _LOOK)
        for child in children:
            if child._stdout in ready:
                child._read()
            elif child in over:  # whatever it has left behind may have its output open
                child._silent = True
        if not ready and time.monotonic() > end:
            raise TimeoutError(f"no answer within {seconds:g} s")


def ask(module: str, request: Any = None, *, seconds: float, python: str | None = None) -> Message:
    """Return a module's first answer to a request. Raises ChildFailed."""
    with Children() as children:
        child = children.start(module, request=request, python=python)
        try:
            answer: Message | None = child.hear(seconds)
        except TimeoutError as error:
            raise ChildFailed(str(error)) from None
        if answer is None:
            status = child.end()
            raise ChildFailed(f"the process {ended(status)} without an answer", child.said(), status)
        return answer


# ---- in the child ----------------------------------------------------------------------------------------------------

_answers: IO[str] | None = None


def requests() -> Iterator[Any]:
    """Yield requests to this process, until its parent ends it or is gone.

    From the first on it has no standard input, and its output goes to standard error."""
    global _answers
    with open(os.dup(0)) as asked:
        _answers = open(os.dup(1), "w")  # noqa: SIM115
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        for line in asked:
            yield json.loads(line)


def tell(kind: str, **what: Any) -> None:
    """Send a message to the parent. If the parent is gone, this process ends too."""
    assert _answers is not None
    try:
        _answers.write(json.dumps({"kind": kind, **what}) + "\n")
        _answers.flush()
    except BrokenPipeError:
        os._exit(1)


# ---- what libraries print when they are imported --------------------------------------------------------------------

_WARNINGS: list[tuple[str, type[Warning]]] = [
    ("Failed to initialize NumPy", UserWarning),  # torch, without NumPy
    ("The pynvml package is deprecated", FutureWarning),  # torch.cuda, with the old name of NVML's package
]


def silence_libraries() -> None:
    """Silence libraries in this process from now on."""
    for begin, category in _WARNINGS:
        warnings.filterwarnings("ignore", re.escape(begin), category)


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with settings that silence libraries; its own settings for warnings and logs are
    kept."""
    ours = [f"ignore:{begin}:{category.__name__}" for begin, category in _WARNINGS]
    own = environment.get("PYTHONWARNINGS")
    return {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **environment,
        "PYTHONWARNINGS": ",".join([*ours, *filter(None, [own])]),
    }
