"""`python -m memopt run`: the script runs as it would alone and ends as it would; what was seen is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import run_in_terminal

from memopt._memory.recording import recording_file
from memopt._run.parent import MemoryCurve, Sample
from memopt._runtime.host_memory import available, limit_of

ROOT = Path(__file__).resolve().parents[3]

TRAINING = """
import importlib.util, os, sys
before = "torch" in sys.modules or importlib.util.find_spec("torch") is None
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(5):
    x = torch.randn(16, 64)
    kept.append(x)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", before, sys.argv[1:])
exec(sys.argv[1])
"""


def memopt(*arguments: str, cwd: Path, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "memopt", *arguments]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment,
    } | options
    return subprocess.Popen(command, cwd=cwd, **options)


def done(*arguments: str, cwd: Path):
    process = memopt(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name


@pytest.mark.sampled("scripts under `memopt run`")
def test_a_script_runs_as_alone_and_its_memory_is_told_and_written(tmp_path):
    status, out, err = done("run", script(tmp_path, TRAINING), "sys.exit(7)", "--epochs", "3", cwd=tmp_path)
    assert status == 7, err
    assert out == "trained False ['sys.exit(7)', '--epochs', '3']\n"
    (file,) = tmp_path.glob("memopt-train.*.mopt")
    seen = recording_file.load(file)
    assert sum(mark.kind == "step" for mark in seen.marks) == 5
    assert seen.facts["command"] == ["train.py", "sys.exit(7)", "--epochs", "3"]
    assert "parameters" in err and "train.py:10" in err and f"python -m memopt report {file.name}" in err
    assert "+4.00 KiB/step from train.py:9, held by `kept[*]` (train.py:10)" in err
    assert f"(pid {file.name.split('.')[1]}) ended with 7" in err


@pytest.mark.sampled("scripts under `memopt run`")
def test_a_script_that_fails_shows_its_own_traceback_and_keeps_the_data(tmp_path):
    status, _, err = done("run", script(tmp_path, TRAINING), "raise KeyError('as planned')", cwd=tmp_path)
    assert status == 1 and "KeyError: 'as planned'" in err
    assert "as_main" not in err and "run_child.py" not in err and err.startswith("Traceback")
    assert len(list(tmp_path.glob("*.mopt"))) == 1


@pytest.mark.sampled("scripts under `memopt run`")
def test_the_report_is_folded_at_the_terminals_width_where_there_is_one(tmp_path):
    name = script(tmp_path, TRAINING, "a-script-with-a-long-name-that-has-no-room.py")
    command = [sys.executable, "-m", "memopt", "run", name, "pass"]
    status, output = run_in_terminal(command, columns=60, cwd=tmp_path)
    _, _, report = output.decode().replace("\r", "").partition("\nmemopt run: ")
    assert (
        status == 0
        and "at the peak, by line:" in report
        and "\n    python -m memopt report memopt-a-" in report
    )
    wide = [line for line in report.splitlines() if len(line) > 60]
    assert all(name in line or ".mopt" in line for line in wide), wide
    with open(tmp_path / "errors", "w") as file:  # of a terminal's width, and not to it
        run_in_terminal(command, columns=60, cwd=tmp_path, stderr=file)
    lines = (tmp_path / "errors").read_text().splitlines()
    assert any(60 < len(line) <= 118 and line.startswith("  recorded in") for line in lines)


@pytest.mark.sampled("scripts under `memopt run`")
def test_os__exit_and_forked_children_keep_the_data_once(tmp_path):
    end = "if os.fork() == 0: sys.exit(3)\nos.wait()\nos._exit(9)"
    status, _, err = done("run", "-o", "mine.mopt", script(tmp_path, TRAINING), end, cwd=tmp_path)
    assert status == 9, err
    assert [path.name for path in tmp_path.glob("*.mopt")] == ["mine.mopt"]
    assert err.count("recorded in") == 1


@pytest.mark.sampled("scripts under `memopt run`")
def test_a_script_that_is_killed_leaves_what_was_seen_from_outside(tmp_path):
    end = "block = bytearray(200 << 20); import time; time.sleep(0.6); os.kill(os.getpid(), 9)"
    status, _, err = done("run", script(tmp_path, TRAINING), end, cwd=tmp_path)
    assert status == 128 + 9
    assert "was ended by signal 9 (SIGKILL)" in err and "limit of host memory:" in err
    assert "last seen after" in err and "optimizer step" in err


@pytest.mark.sampled("scripts under `memopt run`")
def test_processes_of_multiprocessing_work_by_either_way_of_starting(tmp_path):
    text = """
import multiprocessing, sys
def square(x): return x * x
if __name__ == "__main__":
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(2) as pool:
            print(way, pool.map(square, range(4)))
"""
    status, out, err = done("run", script(tmp_path, text), cwd=tmp_path)
    assert (status, out) == (0, "fork [0, 1, 4, 9]\nspawn [0, 1, 4, 9]\n"), err


def test_a_child_that_is_terminated_as_it_is_forked_ends(tmp_path):
    """A signal that a handler of Python's gets before the child is Python's again is forgotten."""
    text = """
import os, signal, time
ends = set()
for _ in range(5):
    child = os.fork()
    if not child:
        time.sleep(20)
        os._exit(3)
    os.kill(child, signal.SIGTERM)
    ends.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*ends, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    status, out, err = done("run", script(tmp_path, text), cwd=tmp_path)
    assert (status, out) == (0, f"{-signal.SIGTERM} set()\n"), err


WAITING = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {after}
"""


@pytest.mark.sampled("scripts under `memopt run`")
@pytest.mark.parametrize("after,status", [("sys.exit(5)", 5), ("raise", 128 + signal.SIGINT)])
def test_an_interrupt_reaches_the_script_which_decides(tmp_path, after, status):
    # A shell starts what runs in its background deaf to interrupts, and so the suite.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = memopt("run", script(tmp_path, WAITING.format(after=after)), cwd=tmp_path, **heard)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)  # to the parent alone, which passes it on
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (status, "interrupted\n"), err
    assert "memopt run: train.py" in err


@pytest.mark.sampled("scripts under `memopt run`")
def test_an_interrupt_from_a_terminal_comes_once(tmp_path):
    text = """
import signal, sys, time
count = 0
def heard(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, heard)
print("ready", flush=True)
end = time.monotonic() + 600
while not count and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.5)
print(count)
"""
    leader, follower = os.openpty()
    process = memopt(
        "run",
        script(tmp_path, text),
        cwd=tmp_path,
        stdin=follower,
        preexec_fn=lambda: (os.setsid(), __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0)),
    )
    assert process.stdout.readline() == "ready\n"
    os.write(leader, b"\x03")
    out, err = process.communicate(timeout=600)
    os.close(leader)
    os.close(follower)
    assert (process.returncode, out) == (0, "1\n"), err


@pytest.mark.sampled("scripts under `memopt run`")
def test_termination_keeps_the_data(tmp_path):
    process = memopt(
        "run",
        script(tmp_path, TRAINING),
        "print('ready', flush=True); import time; time.sleep(60)",
        cwd=tmp_path,
    )
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert len(list(tmp_path.glob("*.mopt"))) == 1 and "SIGTERM" in err


@pytest.mark.sampled("scripts under `memopt run`")
def test_modules_folders_and_odd_names_run_too(tmp_path):
    (tmp_path / "pkg").mkdir()
    script(tmp_path / "pkg", "import sys; print(__name__, __package__, sys.argv[1:])", "__main__.py")
    script(tmp_path / "pkg", "", "__init__.py")
    assert done("run", "-m", "pkg", "--x", "1", cwd=tmp_path)[:2] == (0, "__main__ pkg ['--x', '1']\n")
    assert done("run", "-q", "pkg", "-m", cwd=tmp_path)[:2] == (0, "__main__  ['-m']\n")
    status, out, err = done("run", "-q", script(tmp_path, "print(__file__)", "noending"), cwd=tmp_path)
    assert (status, out, err) == (0, f"{tmp_path / 'noending'}\n", "")


def test_a_script_without_torch_is_watched_from_outside_alone(tmp_path):
    text = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))"
    status, out, err = done("run", script(tmp_path, text), cwd=tmp_path)
    assert (status, out) == (0, "False\n") and "memopt run: train.py" in err


def test_a_wrong_call_names_the_mend(tmp_path):
    script(tmp_path, "pass")
    (tmp_path / "there.mopt").write_text("x")
    cases = [
        (("run",), "name a script to run"),
        (("run", "nowhere.py"), "there is no such script"),
        (("run", "-o", "there.mopt", "train.py"), "or -f to write over it"),
        (("run", "-o", "no/where.mopt", "train.py"), "no such folder"),
        (("run", "--budget", "many", "train.py"), "many"),
        (("run", "--max-events", "0", "train.py"), "1 or more"),
        (("run", "--backend", "other", "train.py"), "invalid choice"),
    ]
    for arguments, message in cases:
        status, out, err = done(*arguments, cwd=tmp_path)
        assert (status, out) == (2, "") and message in err, arguments
    assert (tmp_path / "there.mopt").read_text() == "x"


@pytest.mark.sampled("scripts under `memopt run`")
def test_what_cannot_be_recorded_is_said_and_the_script_runs(tmp_path):
    status, out, err = done("run", "--device", "cuda", script(tmp_path, TRAINING), "pass", cwd=tmp_path)
    assert status == 0 and out.startswith("trained")
    assert "nothing is recorded: device='cuda': there is no CUDA device here" in err


# ---- what the parent looks at ----------------------------------------------------------------------------------------


def test_the_tightest_limit_of_the_groups_around_a_process_holds(tmp_path):
    inner = tmp_path / "cg" / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       16777216 kB\n")
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/job/step\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (inner.parent / "memory.max").write_text(f"{4 << 30}\n")
    found = limit_of(7, str(tmp_path / "proc"), str(tmp_path / "cg"))
    assert found.size == 4 << 30 and str(inner.parent) in found.where and found.kills == 2
    (inner.parent / "memory.max").write_text("max\n")
    found = limit_of(7, str(tmp_path / "proc"), str(tmp_path / "cg"))
    assert (found.size, found.where) == (16 << 30, "the machine's")


def test_what_is_free_is_what_the_tightest_group_has_left_with_its_page_cache(tmp_path):
    inner = tmp_path / "cg" / "job"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {8 << 20} kB\nSwapFree: {1 << 20} kB\n")
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/job\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text(f"{3 << 30}\n")
    where = (7, str(tmp_path / "proc"), str(tmp_path / "cg"))
    assert available(*where) == 9 << 30 and available(*where, swap=False) == 8 << 30
    (inner / "memory.max").write_text(f"{4 << 30}\n")
    (inner / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 20}\nactive_file {1 << 20}\n")
    assert available(*where) == (1 << 30) + (2 << 20)
    assert available(8, str(tmp_path / "none")) is None


def test_limits_of_version_1_are_read_and_none_is_said_to_be_none(tmp_path):
    group = tmp_path / "cg" / "memory" / "job"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("5:cpu:/x\n4:hugetlb,memory:/job\n")
    (group / "memory.limit_in_bytes").write_text(f"{3 << 30}\n")
    (group / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 1\n")
    found = limit_of(7, str(tmp_path / "proc"), str(tmp_path / "cg"))
    assert found.size == 3 << 30 and found.kills == 1
    assert limit_of(8, str(tmp_path / "none")) == (None, "unknown", None)


def test_the_curve_counts_processes_below_and_stays_bounded():
    # It writes what it has taken before it says so, so that the memory is resident when it is looked at.
    hold = "import sys\nblock = bytearray(80 << 20); print('ready', flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        curve = MemoryCurve(process.pid, interval=0)
        curve.sample()
        assert len(curve.samples[0].resident) == 2 and curve.peak > 80 << 20
        for _ in range(1200):
            curve.interval = 0
            curve.sample()
        assert 100 < len(curve.samples) <= 513 and 1 <= len(curve.bars()) <= 32
    finally:
        process.communicate(timeout=600)
    gone = MemoryCurve(process.pid)
    gone.sample()
    assert gone.samples == [] and gone.growth() == [] and gone.bars() == ""


def test_who_grew_last_is_named_with_its_rate():
    samples = [Sample(float(n), {7: 100, 8: 50 + 10 * n, 9: 5}) for n in range(20)]
    samples.append(Sample(20.0, {7: 90, 8: 300, 11: 60}))
    curve = MemoryCurve(7, samples=samples, names={7: "a", 8: "b", 9: "c", 11: "d"})
    # Over the last quarter: process 8 from 200 to 300 bytes, 11 is new, 7 shrank, 9 has ended.
    assert curve.growth() == [(8, "b", 100, 20.0), (11, "d", 60, 12.0)]
