"""memopt.estimate() of functions that do their worst to files: nothing of the user's is changed, nothing is left
behind, and where the kernel keeps nothing, nothing runs that was not asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ways_to_write
from test_protection import kernel_has

HERE = Path(__file__).resolve().parents[2] / "helpers"
DAEMON = f"8{os.getpid()}"  # how long a process of ours sleeps: no other suite's does
REFUSED = {"overlay": "", "landlock": "unshare", "neither": "unshare,landlock_create_ruleset"}
WAYS = {"simulated": "simulated device", "fake": "fake tensors"}
WEIGHT = 512 * 512 * 4
pytestmark = pytest.mark.sampled("estimates as processes")
PROGRAM = """
import logging, os, pathlib, subprocess, sys, threading
import torch
import memopt
import ways_to_write as ways

WORK, METHOD, PYTHON, LEAST = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
log = logging.FileHandler(WORK + "/log.txt")

def train():
    print("it ran", file=sys.stderr)
    BODY
    return torch.nn.Linear(512, 512, bias=False), torch.ones(2, 512), torch.optim.SGD

def estimate(**more):
    python = None if METHOD == "fake tensors" else PYTHON
    return memopt.estimate(train, method=METHOD, python=python, quick=True, **more)

threading.Thread(target=threading.Event().wait, daemon=True).start()  # as in a notebook
torch.ones(1 << 20).sum()
END
"""
PRINTED = "print(estimate().by_category['parameters'])"


@pytest.fixture(params=WAYS)
def run(request, tmp_path):
    """Runs a program in a folder of files whose function has that body; returns what it printed and said."""
    work = tmp_path / "work"
    work.mkdir()
    ways_to_write.prepare(str(work))
    (work / "log.txt").write_text("precious")
    sim = request.config.getoption("--sim-python")

    def run(body, end=PRINTED, kernel="overlay", least=0):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("BODY", body.replace("\n", "\n    ")).replace("END", end))
        before = ways_to_write.state(str(work))
        line = [sys.executable, str(program), str(work), WAYS[request.param], sim, str(least)]
        done = subprocess.run(
            [sys.executable, str(HERE / "refusing.py"), REFUSED[kernel], *line],
            cwd=work,
            env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ways_to_write.state(str(work)) == before, done.stderr
        return done.stdout.strip(), done.stderr

    run.fakes = request.param == "fake"
    return run


def needs(way):
    if not kernel_has(way):
        pytest.skip(f"this kernel, or what it runs in, has no {way}")


@pytest.mark.parametrize("kernel", ["overlay", "landlock"])
def test_a_working_folder_is_what_it_was(run, kernel):
    """Also what this process had open."""
    needs(kernel)
    least = len(ways_to_write.WAYS) - 8 if kernel == "overlay" else 20
    body = (
        "ways.with_torch()\ndone = ways.write_all(WORK)\nassert done >= LEAST, done\n"
        "log.stream.write('X'); log.stream.flush()\n"
        "with open(WORK + '/open_w') as file: assert file.read() == 'X'"
    )
    if not run.fakes:
        body = body.replace("log.stream.write('X'); log.stream.flush()\n", "")  # it does not cross
    printed, said = run(body, kernel=kernel, least=least)
    assert printed == str(WEIGHT), said


@pytest.mark.parametrize("kernel", ["overlay", "landlock"])
def test_what_it_leaves_running_is_ended(run, kernel):
    needs(kernel)
    body = f"subprocess.Popen(['sleep', '{DAEMON}'], start_new_session=True)"
    printed, said = run(body, kernel=kernel)
    assert printed == str(WEIGHT), said
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if sleeps(path)]


def sleeps(path):
    try:
        return DAEMON.encode() in path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_where_the_kernel_protects_nothing_it_runs_only_if_asked_to(run):
    body = "open(WORK + '/open_w', 'w').write('X')"
    end = (
        "try: estimate()\n"
        "except RuntimeError as error: print(error)\n"
        "print('then', file=sys.stderr)\n"
        "print(estimate(unprotected=True).by_category['parameters'])"
    )
    printed, said = run(body, end, kernel="neither")
    refused, figure = printed.splitlines()
    assert "unprotected=True" in refused and figure == str(WEIGHT), said
    assert "it ran" not in said.partition("then")[0]


def test_its_errors_come_back(run):
    printed, said = run(
        "raise ValueError('no such data')", "try: estimate()\nexcept RuntimeError as e: print(e)"
    )
    assert "ValueError: no such data" in printed, said
