"""The Python of one of environments.py's environments, for tests that start a process there."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def python_of(environment: str) -> str:
    """Made where it is not."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "tests/environments.py"), environment], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()[-1]


def run_there(environment: str, source: str, *arguments: str) -> str:
    """Return the output of a program there that finds memopt; a failure is the test's. It has no file, so its workers
    are its forks, which from CPython 3.14 on is not the default."""
    forks = "import multiprocessing\nmultiprocessing.set_start_method('fork')\n"
    done = subprocess.run(
        [python_of(environment), "-c", forks + source, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,  # a hang; a busy host may take minutes
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
