"""An estimate's child process: a script that was written for a GPU, on a device that computes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIM = None
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

TRAIN = """
import sys, torch
from torch import nn

width, rows = 1024, 4096
model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    x = torch.randn(rows, width).cuda()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    print("step", step, loss.item())
sys.exit(3)
"""


@pytest.fixture
def estimate(tmp_path):
    """Runs a script's source in a child process and gives its answer."""

    def run(source: str, *arguments: str, **request: object) -> dict:
        script, answer, asked = tmp_path / "train.py", tmp_path / "answer.json", tmp_path / "request.json"
        script.write_text(source)
        answer.unlink(missing_ok=True)
        given = {"argv": [str(script), *arguments], "answer": str(answer), "memory": 80 << 30}
        asked.write_text(json.dumps(given | request))
        done = subprocess.run(
            [sys.executable, "-m", "memopt.estimation.child", str(asked)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert answer.exists(), done.stdout + done.stderr
        found = json.loads(answer.read_text())
        assert done.returncode == found["exit_status"]
        return found | {"printed": done.stdout, "complained": done.stderr}

    return run


def test_a_script_runs_to_its_own_exit_and_its_peak_survives_what_it_resets(estimate):
    answer = estimate(TRAIN)
    assert (answer["stopped"], answer["exit_status"], answer["steps"]) == ("exit", 3, 5)
    weights = 4 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    hidden = 4 * 4096 * 4096
    assert (
        answer["peak_allocated"] > 4 * weights + 2 * hidden
    )  # with Adam's moments: not the first step's peak
    assert answer["peak_reserved"] >= answer["peak_allocated"]
    assert "step 4 1.0" in answer["printed"]
    assert [(guess["kind"], guess["count"]) for guess in answer["guesses"]] == [("value", 5)]
    assert answer["guesses"][0]["where"].endswith("train.py:15")
    assert answer["oom"] is None


def test_a_script_ends_at_the_wanted_step(estimate):
    answer = estimate(TRAIN, steps=2)
    assert (answer["stopped"], answer["exit_status"], answer["steps"]) == ("steps", 0, 2)
    assert answer["peak_allocated"] == estimate(TRAIN)["peak_allocated"]


def test_out_of_memory_names_the_line_and_what_was_asked_for(estimate):
    peak = estimate(TRAIN)["peak_allocated"]
    answer = estimate(TRAIN, memory=int(peak * 0.5))
    assert answer["stopped"] == "error" and answer["exit_status"] == 1
    oom = answer["oom"]
    assert Path(oom["file"]).name == "train.py" and oom["line"] == 10
    assert oom["text"] == "loss = model(x).square().mean()" and oom["function"] == "<module>"
    assert oom["asked"] % MIB == 0 and oom["asked"] + oom["allocated"] > 0.4 * peak
