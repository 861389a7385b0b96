"""The runner of child processes: what a child is asked and tells, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from memopt._runtime import process
from memopt._runtime.process import ChildFailed, Children, GivenUp, hear

MODULES = {
    "echoes": """\
print("before it is heard", flush=True)
for request in process.requests():
    print("asked", request, flush=True)
    process.tell("echo", request=request)
""",
    "starts_another": """\
import subprocess, time
next(process.requests())
process.tell("started", pid=subprocess.Popen(["sleep", "3600"]).pid)
time.sleep(3600)
""",
    "fails": "raise SystemExit('of the module')",
    "waits": "import time\ntime.sleep(3600)",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(f"from memopt._runtime import process\n{code}")
    monkeypatch.syspath_prepend(str(tmp_path))


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_requests_are_answered_and_prints_are_output() -> None:
    large = "x" * (1 << 18)  # more than a pipe holds
    with Children() as children:
        child = children.start("echoes", request=large)
        assert child.hear(600) == ("echo", {"request": large})
        child.send([1, None])
        assert child.hear(600) == ("echo", {"request": [1, None]})
        with pytest.raises(TimeoutError):
            child.hear(0.0)
        assert child.said(1) == "asked [1, None]" and child.hear() is None
        assert process.ended(child.end()) == "was ended by SIGTERM"


def test_what_came_first_is_heard_first_of_several() -> None:
    with Children() as children:
        silent, other = children.start("waits"), children.start("echoes", request=1)
        assert hear([silent, other], 600) == (other, ("echo", {"request": 1}))
        other.end()
        assert hear([silent, other], 600) == (other, None)


def test_leaving_ends_what_a_child_has_started() -> None:
    with Children() as children:
        child = children.start("starts_another")
        message = child.hear(600)
        assert message is not None and message.kind == "started"
    assert is_gone(child.pid) and is_gone(message.what["pid"])
    with pytest.raises(GivenUp):
        children.start("waits")


def test_a_failure_says_how_it_ended_and_what_was_written() -> None:
    with pytest.raises(ChildFailed, match="ended with status 1 without an answer\nof the module") as failure:
        process.ask("fails", seconds=600)
    assert (failure.value.output, failure.value.status) == ("of the module", 1)
    with pytest.raises(ChildFailed, match="no answer within 0.1 s"):
        process.ask("waits", seconds=0.1)
    with pytest.raises(FileNotFoundError):
        process.ask("waits", seconds=0.1, python="/nothing/python")


def test_an_interrupt_at_the_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, []

    def interrupted(*arguments: object, **more: object) -> object:
        started.append(popen(*arguments, **more))  # type: ignore[call-overload]
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt), Children() as children:
            children.start("waits")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1 and is_gone(started[0].pid)
