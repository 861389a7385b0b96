"""`python -m memopt run` of a script on CUDA: the device's history, the out-of-memory error, and memopt's allocator by
a flag."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memopt._memory.recording import recording_file

SIM = {"memory": "64MiB"}
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from memopt import sim
sim.activate(memory="128MiB")
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(5):
    x = torch.randn(64, 256, device="cuda")
    kept.append(model(x))
    kept[-1].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1] == "oom":
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


def run(folder: Path, *arguments: str):
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "memopt", "run", "-o", "out.mopt", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.sampled("scripts under `memopt run`")
def test_an_out_of_memory_is_in_the_recording_and_ends_the_script_as_ever(tmp_path):
    status, err = run(tmp_path, "train.py", "oom")
    assert status == 1 and "torch.OutOfMemoryError: CUDA out of memory" in err
    seen = recording_file.load(tmp_path / "out.mopt")
    assert seen.device == "cuda:0" and "simulated, not measured" in seen.source
    assert [mark.kind for mark in seen.marks].count("oom") == 1 and "out of memory after" in err
    assert "+64.0 KiB/step from train.py:11, held by `kept[*]` (train.py:11)" in err


@pytest.mark.sampled("scripts under `memopt run`")
def test_memopts_allocator_and_a_budget_come_by_flags(tmp_path):
    status, err = run(tmp_path, "--backend", "pool", "--budget", "64MiB", "train.py", "oom")
    assert status == 1 and "torch.OutOfMemoryError" in err
    seen = recording_file.load(tmp_path / "out.mopt")
    assert seen.source.startswith("history of memopt's allocator")
    assert seen.facts["peak_reserved"] <= 64 << 20
    assert seen.by_category(seen.events - 1)["parameters"] == (256 * 256 + 256) * 4
    assert "Linear" in {seen.modules[n] for n in seen.columns["module"].tolist()}
