"""Output of an estimate while it works: phases, the script's own output with a label, and one line when interrupted."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memopt._estimate.progress import Followed
from memopt._runtime import process

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, warnings
import torch
print("on standard output")
print("on standard error", file=sys.stderr)
warnings.warn("The pynvml package is deprecated. Please install another.", FutureWarning)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8, device=device)).sum().backward()
sys.stderr.write("\\rstep 1\\rstep 2\\n")
optimizer.step()
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "memopt", "estimate", "--steps", "1", *arguments]


def environment(**more: str) -> dict[str, str]:
    """With standard output that Python buffers by blocks, as it does by default where it is no terminal."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | more


def done(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=600
    )


@pytest.mark.sampled("estimates as processes")
@pytest.mark.parametrize("way", ["simulated", "fake tensors"])
def test_the_scripts_output_is_labelled_and_the_answer_stands_alone(tmp_path, request, way):
    """Each line comes when it is written, before what comes after."""
    python = ["--python", request.config.getoption("--sim-python")] if way == "simulated" else []
    told = done(tmp_path, "--quick", "--json", *python, "train.py")
    assert json.loads(told.stdout)["steps"] == 1, told.stderr
    phase, *lines = told.stderr.splitlines()
    assert phase.startswith("memopt estimate: train.py")
    own = [line for line in lines if not line.startswith("memopt estimate: ")]  # phases
    assert own == ["script| on standard output", "script| on standard error", "script| step 2"]


@pytest.mark.sampled("estimates as processes")
def test_a_quiet_one_says_the_answer_alone_and_a_verbose_one_what_libraries_say(tmp_path):
    assert done(tmp_path, "-q", "train.py").stderr == ""
    said = done(tmp_path, "-v", "train.py").stderr
    assert "script| " in said and "pynvml" in said


@pytest.mark.sampled("estimates as processes")
def test_an_interrupt_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, time\nopen('written', 'w').write('x')\nprint('ready')\ntime.sleep(600)\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    process = subprocess.Popen(
        command("train.py"),
        cwd=tmp_path,
        env=environment(TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while (line := process.stderr.readline()) != "script| ready\n":
        assert line, process.wait()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (128 + signal.SIGINT, "", "memopt estimate: interrupted\n")
    assert list(folder.glob("memopt*")) == [] and not (tmp_path / "written").exists()


@pytest.mark.sampled("estimates as processes")
def test_on_a_terminal_there_is_one_line_that_goes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rich.py").write_text("raise ImportError('none')")
    leader, follower = pty.openpty()
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    process = subprocess.Popen(
        command("train.py"),
        cwd=tmp_path,
        env=environment(PYTHONPATH=path, TERM="xterm"),
        stderr=follower,
        stdout=subprocess.PIPE,
    )
    os.close(follower)
    parts = []
    try:
        while part := os.read(leader, 1 << 16):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    process.communicate(timeout=600)
    os.close(leader)
    text = b"".join(parts).decode()
    assert process.returncode == 0 and "script| on standard output\r\n" in text
    shown = text.replace("\r\n", "\n").split("\n")
    # The phase is never a line of its own: it is drawn where the next thing is written, or erased.
    assert any("memopt estimate: train.py" in line for line in shown)
    assert all("\x1b[" in line for line in shown if "memopt estimate: train.py" in line)


def test_lines_come_as_they_are_written_and_the_last_without_an_end(tmp_path):
    path, told = tmp_path / "output", []
    with open(path, "wb") as file, Followed(path, told.append):
        file.write(b"one\ntwo 1%\rtwo 2%\nthree \xff\n\nfour")
        file.flush()
    assert told == ["one", "two 2%", "three \ufffd", "", "four"]


def test_what_the_environment_says_of_warnings_holds():
    told = process.quiet_environment({"PYTHONWARNINGS": "error", "TF_CPP_MIN_LOG_LEVEL": "0", "A": "b"})
    assert (
        told["PYTHONWARNINGS"].endswith(",error") and told["TF_CPP_MIN_LOG_LEVEL"] == "0" and told["A"] == "b"
    )
    code = "import warnings\nwarnings.warn('Failed to initialize NumPy: none')\nwarnings.warn('another')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=process.quiet_environment(os.environ),
        capture_output=True,
        text=True,
    )
    assert "another" in ran.stderr and "NumPy" not in ran.stderr
