"""An estimate's child process: a script that was written for a GPU, on a device that computes nothing."""

from pathlib import Path

from estimation_children import estimate

SIM = None
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


def test_a_script_runs_to_its_own_exit_and_its_peak_survives_what_it_resets(tmp_path):
    answer = estimate(tmp_path, TRAIN)
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


def test_a_script_ends_at_the_wanted_step(tmp_path):
    answer = estimate(tmp_path, TRAIN, steps=2)
    assert (answer["stopped"], answer["exit_status"], answer["steps"]) == ("steps", 0, 2)
    assert answer["peak_allocated"] == estimate(tmp_path, TRAIN)["peak_allocated"]


def test_out_of_memory_names_the_line_and_what_was_asked_for(tmp_path):
    peak = estimate(tmp_path, TRAIN)["peak_allocated"]
    answer = estimate(tmp_path, TRAIN, memory=int(peak * 0.5))
    assert answer["stopped"] == "error" and answer["exit_status"] == 1
    oom = answer["oom"]
    assert Path(oom["file"]).name == "train.py" and oom["line"] == 10
    assert oom["text"] == "loss = model(x).square().mean()" and oom["function"] == "<module>"
    assert oom["asked"] % MIB == 0 and oom["asked"] + oom["allocated"] > 0.4 * peak
