"""Ctrl-C in a command of memopt's: one line, the status 130, and nothing left running. Each is interrupted when it has
said, or shown by opening a pipe, that it is at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from memopt._estimate.survey import Survey

ROOT = Path(__file__).resolve().parents[3]
WAITS = """\
import os, sys, time
print("ready", os.getpid(), file=sys.stderr, flush=True)
time.sleep(3600)
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it from a terminal."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # A shell starts what runs in its background deaf to interrupts, and so the suite.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def interrupt(process: subprocess.Popen[str], command: str, group: bool) -> None:
    """By Ctrl-C, which reaches the whole group, or by a signal to the one process."""
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert out == "" and err == f"memopt {command}: interrupted\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "signal"])
@pytest.mark.parametrize("command", [["report", "--text"], ["diff", "other"], ["replay"]], ids=lambda c: c[0])
def test_a_command_that_reads_a_file(command: list[str], group: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    os.mkfifo(tmp_path / "other")
    first = "other" if "other" in command else "file"
    process = started(tmp_path, "-m", "memopt", *command, "file")
    with open(tmp_path / first, "wb"):  # as soon as it reads
        interrupt(process, command[0], group)


def test_the_doctor(tmp_path: Path) -> None:
    """At whatever it looks at."""
    code = "import sys\nfrom memopt._runtime import doctor as diagnosis\nfrom memopt.__main__ import main\n"
    process = started(
        tmp_path,
        "-c",
        f"{code}def looks():\n    exec({WAITS!r})\ndiagnosis.doctor = looks\nsys.exit(main(['doctor']))",
    )
    assert process.stderr is not None and process.stderr.readline().startswith("ready")
    interrupt(process, "doctor", True)


@pytest.mark.sampled("estimates as processes")
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "signal"])
@pytest.mark.parametrize("way", ["simulated", "fake tensors", "fit"])
def test_an_estimate_ends_its_children(
    way: str, group: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    command = "fit" if way == "fit" else "estimate"
    python = ["--python", request.config.getoption("--sim-python")] if way != "fake tensors" else []
    process = started(tmp_path, "-m", "memopt", command, "--gpu", "8GiB", *python, "script.py")
    assert process.stderr is not None
    told = next(line.split() for line in process.stderr if line.startswith("script| "))
    assert told[:2] == ["script|", "ready"] and told[2] != str(process.pid)
    interrupt(process, command, group)
    assert not Path(f"/proc/{told[2]}").exists() and not [*tmp_path.glob("*.json")]


@pytest.mark.sampled("estimates as processes")
def test_an_estimate_that_is_killed_leaves_no_child(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    python = request.config.getoption("--sim-python")
    process = started(tmp_path, "-m", "memopt", "estimate", "--python", python, "script.py")
    assert process.stderr is not None
    child = next(line.split()[2] for line in process.stderr if line.startswith("script| ready"))
    process.kill()
    process.communicate(timeout=600)
    until = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def test_an_interrupt_does_not_wait_for_runs_beside_it() -> None:
    """Their children end when it has left the block that they were started in."""
    begun, left, waited = threading.Event(), threading.Event(), []

    class Interrupted:
        jobs = 2

        def _ask(self, number: int) -> None:
            if number == 0:
                assert begun.wait(600)
                raise KeyboardInterrupt
            begun.set()
            waited.append(left.wait(60))

    try:
        with pytest.raises(KeyboardInterrupt):
            Survey._several(cast(Any, Interrupted()), cast(Any, [(0,), (1,)]))
        assert False not in waited
    finally:
        left.set()
