"""Child processes that estimate scripts, one after another, and their answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from memopt._estimate.answer import Answer, together
from memopt._estimate.progress import Followed
from memopt._estimate.request import Request
from memopt._runtime.process import (
    Child,
    ChildFailed,
    Children,
    GivenUp,
    ended,
    last_lines,
    quiet_environment,
)

_GRACE = 30.0  # seconds after which a run is ended that does not keep its own limit
_LEAVING = 10.0  # seconds in which a run ends that has answered: threads may delay the interpreter's end
CHILD = "memopt._estimate.script_process"


class ScriptChildren(Children):
    """Child processes that run scripts, by `python`: one that has ended a run waits for the next, with torch imported.

    tell: is given what a shown script writes, line by line; noise: what libraries say when they are imported is heard
    too."""

    def __init__(
        self, python: str, tell: Callable[[str], None] | None = None, *, noise: bool = False
    ) -> None:
        super().__init__()
        self._python, self._tell = python, tell
        self._environment = dict(os.environ) if noise else quiet_environment(os.environ)
        # Unbuffered, so that what a script prints stands between its errors in its place.
        self._environment["PYTHONUNBUFFERED"] = "1"
        self._ready: list[Child] = []

    def run(self, request: Request, *, show: bool = False, recording: str | None = None) -> Answer:
        """The answer to a request. `show`: what the script writes is told, else it goes nowhere, unless there is no
        answer: then the end of it is in the ChildFailed."""
        with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
            home = Path(folder).resolve()
            answer, asked, output = home / "answer.json", home / "request.json", home / "output"
            recorded = None if recording is None else str(home / "recording.mopt")
            asked.write_text(json.dumps(asdict(replace(request, answer=str(answer), recording=recorded))))
            show = show and self._tell is not None
            output.touch()
            with contextlib.ExitStack() as followed:
                if show and self._tell is not None:
                    followed.enter_context(Followed(output, self._tell))
                end = self._until_ended(asked, output, request.seconds, answer.exists)
            try:
                told = json.loads(answer.read_text())
            except (OSError, ValueError):
                if self._closed:
                    raise GivenUp from None
                said = "" if show else last_lines(output)
                raise ChildFailed(f"the estimate's child process {end} without an answer", said) from None
            if recording is not None and recorded is not None and Path(recorded).exists():
                shutil.copyfile(recorded, recording)
            result = together(Answer.from_json(told), told, home, request.context, request.memory)
            if result.failed and not show:
                result.more["output"] = last_lines(output)
            return result

    def _until_ended(
        self, asked: Path, output: Path, seconds: float | None, answered: Callable[[], bool]
    ) -> str:
        """Run a request, which has that limit of its own, and return in words how it ended."""
        request = [str(asked), str(output)]
        with self._lock:
            child = self._ready.pop() if self._ready else None
        if child is None or child.is_over():  # a host without memory may have ended it
            child = self.start(CHILD, request=request, python=self._python, environment=self._environment)
        else:
            child.send(request)
        end = math.inf if seconds is None else time.monotonic() + seconds + _GRACE
        leaving = waits = False
        try:
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    told = child.hear(0)
                    if told is None:
                        with open(output, "a") as file:
                            file.write(child.said())  # before it had the file
                        return ended(child.end())
                    waits = True
                    return ended(told.what["status"])
                if not leaving and answered():
                    leaving, end = True, min(end, time.monotonic() + _LEAVING)
            return "did not end in its time"
        finally:
            if waits:
                self._ready.append(child)  # from here on it is another thread's
            else:
                child.end()
