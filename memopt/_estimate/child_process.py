"""Child processes that estimate a script each, and their answers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from memopt._estimate.answer import Answer, together
from memopt._estimate.progress import Followed
from memopt._estimate.request import Request
from memopt._runtime.process import ChildFailed, Children, ended, quiet_environment

# A child that does not keep its own limit is ended so many seconds later.
_GRACE = 30.0
CHILD = "memopt._estimate.script_process"


class ScriptChildren(Children):
    """Child processes that run a script each, by `python`. tell: is given what a shown script writes, line by line;
    noise: what libraries say when they are imported is heard too."""

    def __init__(
        self, python: str, tell: Callable[[str], None] | None = None, *, noise: bool = False
    ) -> None:
        super().__init__()
        self._python, self._tell, self._noise = python, tell, noise

    def run(self, request: Request, *, show: bool = False, recording: str | None = None) -> Answer:
        """The answer to a request. `show`: what the script writes is told, else it goes nowhere, unless there is no
        answer: then the end of it is in the ChildFailed."""
        with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
            home = Path(folder).resolve()
            answer, asked, output = home / "answer.json", home / "request.json", home / "output"
            recorded = None if recording is None else str(home / "recording.mopt")
            asked.write_text(json.dumps(asdict(replace(request, answer=str(answer), recording=recorded))))
            show = show and self._tell is not None
            limit = None if request.seconds is None else request.seconds + _GRACE
            environment = dict(os.environ) if self._noise else quiet_environment(os.environ)
            # Unbuffered, so that what a script prints stands between its errors in its place.
            environment["PYTHONUNBUFFERED"] = "1"
            output.touch()
            with contextlib.ExitStack() as followed:
                if show and self._tell is not None:
                    followed.enter_context(Followed(output, self._tell))
                child = self.start(
                    CHILD, str(asked), python=self._python, environment=environment, output=output
                )
                try:
                    child.wait(limit, answer.exists)
                finally:
                    status = child.end()
            try:
                told = json.loads(answer.read_text())
            except (OSError, ValueError):
                said = "" if show else child.said()
                raise ChildFailed(
                    f"the estimate's child process {ended(status)} without an answer", said
                ) from None
            if recording is not None and recorded is not None and Path(recorded).exists():
                shutil.copyfile(recorded, recording)
            result = together(Answer.from_json(told), told, home, request.context, request.memory)
            if result.failed and not show:
                result.more["output"] = child.said()
            return result
