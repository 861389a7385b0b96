"""`python -m memopt run --live`: one line below the script's output, which ends with the script and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT
from terminals import Screen, run_in_terminal

from memopt._run.live_view import figures_line

GIB = 1 << 30
# It trains until it is told that the line has been seen.
TRAINING = """
import os, sys, time
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = torch.ones(3 << 18)
print("begins")
step = 0
while not os.path.exists("seen"):
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    step += 1
    time.sleep(0.01)
    if step % 20 == 0:
        sys.stderr.write("\\rbar")
        sys.stderr.flush()
print("\\nends", sys.stdout.isatty(), os.get_terminal_size(1).columns)
exec(sys.argv[1])
"""
LINE = re.compile(rb"memopt: step \d+, live [^,]+, peak [^,]+, host [^,\x1b\r]+")


def live(folder: Path, end: str, text: str = TRAINING, **options):
    """Run the script until the line has been shown below its progress bar, and to its end."""
    (folder / "train.py").write_text(text)
    shown: list[bytes] = []

    def seen(output: bytes, press) -> None:
        if not shown and (found := LINE.search(output, max(output.rfind(b"bar"), 0))) and b"bar" in output:
            shown.append(found[0])
            (folder / "seen").touch()
        if b"waits\r\n" in output and len(shown) == 1:
            shown.append(b"")
            press(b"\x03")

    command = [sys.executable, "-m", "memopt", "run", "--live", "-q", "train.py", end]
    status, output = run_in_terminal(command, seen, columns=100, cwd=folder, **options)
    return status, output, shown[0].decode()


@pytest.mark.sampled("scripts under `memopt run`")
def test_the_line_is_below_the_scripts_output_and_goes(tmp_path):
    status, output, line = live(tmp_path, "sys.exit(7)")
    assert status == 7, output
    # The 3 MiB that the script keeps.
    assert re.search(r"live 3\.\d+ MiB, peak 3\.\d+ MiB, host [0-9.]+( [KMG]iB)?/[0-9.]+ [KMGT]iB$", line)
    screen = Screen(100).show(output)
    assert screen.text == "begins\nbar\nends True 100" and screen.column == 0


@pytest.mark.sampled("scripts under `memopt run`")
def test_an_error_is_shown_whole_below_the_output(tmp_path):
    status, output, _ = live(tmp_path, "raise KeyError('as planned')")
    lines = Screen(100).show(output).text.splitlines()
    assert status == 1 and lines[:4] == [
        "begins",
        "bar",
        "ends True 100",
        "Traceback (most recent call last):",
    ]
    assert lines[-1] == "KeyError: 'as planned'" and "memopt" not in "".join(lines)


@pytest.mark.sampled("scripts under `memopt run`")
def test_an_interrupt_from_the_terminal_ends_both(tmp_path):
    status, output, _ = live(tmp_path, "print('waits'); time.sleep(600)")
    text = Screen(100).show(output.replace(b"^C", b"")).text
    assert status == 128 + signal.SIGINT
    assert "waits\nTraceback (most" in text and "\nKeyboardInterrupt\nmemopt run: train.py" in text
    assert "memopt:" not in text


@pytest.mark.sampled("scripts under `memopt run`")
def test_output_that_goes_to_a_file_stays_what_it_is(tmp_path):
    text = TRAINING.replace("os.get_terminal_size(1).columns", "''")
    with open(tmp_path / "out", "wb") as file:
        status, output, _ = live(tmp_path, "pass", text, stdout=file)
    assert status == 0 and (tmp_path / "out").read_bytes() == b"begins\n\nends False \n"
    assert Screen(100).show(output).text == "bar"


@pytest.mark.sampled("scripts under `memopt run`")
@pytest.mark.parametrize("dumb", [False, True])
def test_without_a_terminal_it_is_said_and_nothing_is_drawn(tmp_path, dumb):
    (tmp_path / "train.py").write_text("print('runs')")
    command = [sys.executable, "-m", "memopt", "run", "--live", "-q", "train.py"]
    if dumb:
        status, output = run_in_terminal(["env", "TERM=dumb", *command], cwd=tmp_path)
    else:
        done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
        status, output = done.returncode, done.stderr + done.stdout
    lines = output.decode().split()
    assert status == 0 and output.count(b"\n") == 2 and lines[-1] == "runs"
    assert "--live needs a terminal" in " ".join(lines) and b"\x1b" not in output


@pytest.mark.sampled("scripts under `memopt run`")
def test_a_process_that_the_script_leaves_behind_keeps_nobody_waiting(tmp_path):
    text = "import os, time\nif not (child := os.fork()):\n    time.sleep(600)\nprint('left', child)\n"
    (tmp_path / "train.py").write_text(text)
    inner = [sys.executable, "-m", "memopt", "run", "--live", "-q", "train.py"]
    code = f"import subprocess; subprocess.run({inner!r}); print('ended')"
    left: list[int] = []

    def seen(output: bytes, press) -> None:
        if not left and b"ended" in output:
            left.append(int(output.split(b"left ")[1].split()[0]))
            os.kill(left[0], signal.SIGKILL)  # it has this terminal's standard input

    status, _ = run_in_terminal([sys.executable, "-c", code], seen, cwd=tmp_path)
    assert status == 0 and left


def test_what_has_no_room_is_left_out():
    found = {
        "device": "cuda:0",
        "live": 3 * GIB,
        "peak": 4 * GIB,
        "reserved": 5 * GIB,
        "used": 6 * GIB,
        "total": 24 * GIB,
        "steps": 120,
    }
    parts = "step 120, live 3.00 GiB, peak 4.00 GiB, reserved 5.00 GiB, cuda:0 6.00/24.0 GiB"
    assert figures_line(found, (0, 0), 0, 100) == f"memopt: {parts}"
    assert figures_line(found, (0, 0), 0, 79) == parts
    assert (
        figures_line(found, (0, 0), 0, 66) == "step 120, live 3.00 GiB, peak 4.00 GiB, cuda:0 6.00/24.0 GiB"
    )
    assert figures_line(found, (0, 0), 0, 59) == "memopt: live 3.00 GiB, peak 4.00 GiB, cuda:0 6.00/24.0 GiB"
    assert figures_line({}, (GIB >> 1, GIB), 24 * GIB, 60) == "memopt: host 512 MiB/24.0 GiB, peak 1.00 GiB"
    assert figures_line({}, (GIB, GIB), 0, 60) == "memopt: host 1.00 GiB, peak 1.00 GiB"
