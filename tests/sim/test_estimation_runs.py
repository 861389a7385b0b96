"""Runs of one child process of estimates: it imports torch once, and none of them knows of those before it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from memopt._estimate import child_process
from memopt._estimate.request import Request
from memopt._runtime.process import ChildFailed

SIM = None
MIB = 1 << 20

TRAIN = """
import os, sys, torch
print(os.getppid(), torch.get_default_dtype(), os.getcwd(), "LEFT" in os.environ, sys.argv[1:])
print(torch.cuda.mem_get_info()[1] >> 20, torch.cuda.get_device_capability(), torch.cuda.memory_allocated())
kept = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory._snapshot()["segments"][0]["is_expandable"])
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
os.environ["LEFT"] = "1"
os.chdir("/")
"""
ENDS = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "aborted": "import os; os.abort()",
    "over": "import time; time.sleep(600)",
    "left": """
import os, signal, sys, time
ready, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("daemon", os.getpid(), flush=True)
    os.write(told, b"x")
    time.sleep(600)
os.read(ready, 1)
os._exit(0)
""",
}


class Runs:
    """Runs scripts in child processes, and hears what they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def __enter__(self):
        self.children = child_process.ScriptChildren(sys.executable, self.lines.append).__enter__()
        return self

    def __exit__(self, *of):
        self.children.__exit__(*of)

    def run(self, source, *arguments, memory=1024 * MIB, **asked):
        script = self.folder / "script.py"
        script.write_text(source)
        self.lines.clear()
        request = Request([str(script), *map(str, arguments)], "", memory, **asked)
        return self.children.run(request, show=True)

    def pids(self):
        return [child.pid for child in self.children._running]


@pytest.fixture
def runs(tmp_path):
    with Runs(tmp_path) as runs:
        yield runs


def is_over(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.sampled("runs of estimates")
def test_a_run_is_what_it_would_be_alone(runs, tmp_path):
    small = {"memory": 1024 * MIB}
    large = {"memory": 3072 * MIB, "backend": "expandable", "compute_capability": "9.0"}
    by_itself = {}
    for settings in (small, large, small):
        found = runs.run(TRAIN, 300, **settings)
        parent, *words = " ".join(runs.lines).split()
        assert int(parent) == runs.pids()[0] and words[-1] == str(settings is large)
        assert str(settings["memory"] // MIB) in words
        size = settings["memory"]
        if size not in by_itself:
            with Runs(tmp_path) as alone:
                same = alone.run(TRAIN, 300, **settings)
                by_itself[size] = same.peak_allocated, same.held, " ".join(alone.lines).split()[1:]
        assert by_itself[size] == (found.peak_allocated, found.held, words)
    assert len(runs.pids()) == 1


@pytest.mark.sampled("runs of estimates")
def test_the_child_survives_how_a_script_ends(runs):
    first = runs.run(TRAIN, 10)
    for end, words in (("killed", "was ended by SIGKILL"), ("aborted", "was ended by SIGABRT")):
        with pytest.raises(ChildFailed, match=words):
            runs.run(ENDS[end])
    runs.run(ENDS["left"])
    (daemon,) = (int(line.split()[1]) for line in runs.lines if line.startswith("daemon"))
    assert is_over(daemon)
    assert runs.run(TRAIN, 10).peak_allocated == first.peak_allocated and len(runs.pids()) == 1
    os.kill(runs.pids()[0], 9)
    while not is_over(runs.pids()[0]):
        time.sleep(0.01)
    assert runs.run(TRAIN, 10).peak_allocated == first.peak_allocated and len(runs.pids()) == 2


@pytest.mark.sampled("runs of estimates")
def test_a_run_over_its_time_takes_its_child_with_it_and_the_next_has_another(runs, monkeypatch):
    monkeypatch.setattr(child_process, "_GRACE", -600.0)  # before the child keeps the limit itself
    with pytest.raises(ChildFailed, match="did not end in its time"):
        runs.run(ENDS["over"], seconds=601)
    (late,) = runs.pids()
    assert is_over(late)
    assert runs.run(TRAIN, 10).peak_allocated == 10 * MIB
    assert len(runs.pids()) == 2


@pytest.mark.sampled("runs of estimates")
def test_a_child_that_another_thread_has_taken_is_not_ended(runs):
    class Taken(list):
        def append(self, child):
            """Another thread takes it at once."""

    runs.children._ready = Taken()
    runs.run(TRAIN, 10)
    assert not is_over(runs.pids()[0])


@pytest.mark.sampled("runs of estimates")
def test_runs_at_the_same_time_have_a_child_each_and_all_end_with_the_block(tmp_path):
    with Runs(tmp_path) as runs:
        script = tmp_path / "script.py"
        script.write_text(TRAIN)
        peaks = {}

        def run(size):
            peaks[size] = runs.children.run(Request([str(script), str(size)], "", 1024 * MIB)).peak_allocated

        threads = [threading.Thread(target=run, args=(size,)) for size in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert peaks == {10: 10 * MIB, 20: 20 * MIB}
        pids = runs.pids()
        assert len(pids) == 2
    assert all(map(is_over, pids))
