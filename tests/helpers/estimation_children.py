"""Estimates of scripts, each in a child process of the environment that runs the tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def estimate(
    folder: Path, source: str, *arguments: str, cwd: Path | None = None, **request: Any
) -> dict[str, Any]:
    """The answer about a script of this source; besides what it printed, and its process's number."""
    script, private = folder / "train.py", folder / "private"
    script.write_text(source)
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir()
    answer, asked = private / "answer.json", private / "request.json"
    given = {"argv": [str(script), *arguments], "answer": str(answer), "memory": 80 << 30}
    asked.write_text(json.dumps(given | request))
    process = subprocess.Popen(
        [sys.executable, "-m", "memopt._estimate.script_process", str(asked)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=cwd or folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed, complained = process.communicate(timeout=600)  # a hang; a busy host may take minutes
    assert answer.exists(), printed + complained
    found = json.loads(answer.read_text())
    assert process.returncode == found["exit_status"], printed + complained
    return found | {"printed": printed, "complained": complained, "pid": process.pid}
