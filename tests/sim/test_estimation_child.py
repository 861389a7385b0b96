"""An estimate's child process: a script that was written for a GPU, on a device that computes nothing."""

import json
import os
from pathlib import Path

import pytest
from estimation_children import ROOT, estimate

from memopt._estimate import request

SIM = None
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
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


UNUSUAL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    for (x,) in DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=8, num_workers=1):
        print("rows", len(x.cuda()))
    try:
        size = 1 << 20
        while True:
            x = torch.empty(size, device="cuda")
            size *= 2
    except torch.OutOfMemoryError:
        print("largest", size // 2)
    weight = torch.ones(4, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()      # and the script ends while autograd's thread still works
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return estimate(tmp_path_factory.mktemp("whole"), TRAIN, record=True)


def test_a_script_runs_to_its_own_exit_and_its_peak_survives_what_it_resets(whole):
    assert (whole["stopped"], whole["exit_status"], whole["steps"]) == ("exit", 3, 5)
    weights = 4 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    hidden = 4 * 4096 * 4096
    # With Adam's moments: not the first step's peak.
    assert whole["peak_allocated"] > 4 * weights + 2 * hidden
    assert whole["peak_reserved"] >= whole["peak_allocated"]
    assert "step 4 1.0" in whole["printed"]
    assert [(guess["kind"], guess["count"]) for guess in whole["guesses"]] == [("value", 5)]
    assert whole["guesses"][0]["where"].endswith("train.py:15")
    assert whole["oom"] is None and whole["host_peak"] > 1 << 27


def test_the_peaks_bytes_are_somebodys(whole):
    found = whole["by_category"]
    assert found["parameters"] == 4 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    assert found["optimizer"] >= 2 * found["parameters"]
    assert sum(found.values()) == whole["recorded_peak"] <= whole["peak_allocated"]
    # What the allocator rounds up each block to.
    assert whole["peak_allocated"] - whole["recorded_peak"] < 64 * 512
    assert {"train.py:6", "train.py:10"} < {row["name"] for row in whole["by_line"]}
    assert sum(row["bytes"] for row in whole["by_module"]) == sum(found.values())


def test_a_recording_without_the_peak_says_so(tmp_path):
    late = "\nfor _ in range(400): torch.ones(4, device='cuda')\n"
    source = TRAIN.replace("sys.exit(3)", late)
    for events, told in ((100, 1), (1_000_000, 0)):
        found = estimate(tmp_path, source, record=True, events=events)
        assert sum("of the last 100 allocations and frees" in line for line in found["covered"]) == told
        assert (found["moments"] is None) == told and (
            2 * found["recorded_peak"] < found["peak_allocated"]
        ) == told


def test_a_loop_ends_at_the_wanted_step_and_a_recorder_changes_no_peak(tmp_path, whole):
    answer = estimate(tmp_path, TRAIN, steps=2)
    # Two, and that of the range's last number.
    assert (answer["stopped"], answer["exit_status"], answer["steps"]) == ("exit", 3, 3)
    assert answer["peak_allocated"] == whole["peak_allocated"] and answer["by_category"] is None
    answer = estimate(tmp_path, TRAIN, steps=2, shorten="none")
    assert (answer["stopped"], answer["exit_status"], answer["steps"]) == ("steps", 0, 2)


def test_out_of_memory_names_the_line_and_what_was_asked_for(tmp_path, whole):
    answer = estimate(tmp_path, TRAIN, memory=whole["peak_allocated"] // 2)
    assert answer["stopped"] == "error" and answer["exit_status"] == 1
    oom = answer["oom"]
    assert Path(oom["file"]).name == "train.py" and oom["line"] == 10
    assert oom["text"] == "loss = model(x).square().mean()" and oom["function"] == "<module>"
    assert oom["asked"] % MIB == 0 and oom["asked"] + oom["allocated"] > 0.4 * whole["peak_allocated"]


def test_what_a_script_does_besides_training(tmp_path):
    """Workers, a handled out-of-memory error, an end in the midst of a backward pass; on memopt's allocator."""
    answer = estimate(tmp_path, UNUSUAL, memory=1 << 30, backend="pool", batch_size=32)
    assert (answer["stopped"], answer["exit_status"], answer["oom"]) == ("end", 0, None)
    assert answer["failed_requests"] == 1 and "largest" in answer["printed"]
    assert answer["printed"].startswith("rows 32\nrows 32\n") and answer["loaders_of_batch_size"] == 1
    assert "terminate" not in answer["complained"] and "Traceback" not in answer["complained"]


@pytest.mark.skipif(not SOAK, reason="the long form")
@pytest.mark.parametrize("backend", ["native", "expandable", "pool"])
def test_a_scripts_own_error_is_shown_as_it_would_be(tmp_path, backend):
    answer = estimate(tmp_path, 'import torch\nraise ValueError("its own")', backend=backend)
    assert (answer["stopped"], answer["exit_status"], answer["error"]) == ("error", 1, "ValueError: its own")
    assert "train.py" in answer["complained"] and "memopt" not in answer["complained"]


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_a_script_that_goes_on_for_ever_is_ended(tmp_path):
    answer = estimate(tmp_path, "import time\nwhile True:\n    time.sleep(0.05)", seconds=0.5)
    assert (answer["stopped"], answer["exit_status"]) == ("seconds", 0)


def test_a_script_without_reads_is_estimated_as_it_computes(tmp_path):
    """Every operation computed, on the same device: the same peak, and in less memory the same line."""
    source = (ROOT / "benchmarks" / "scripts" / "distillation.py").read_text()
    source = source.replace('    print(f"loss {loss.item():.6f}")', 'print("done")')
    arguments = "--batch-size 4 --image 16 --teacher 8 --student 4 --steps 2".split()
    small, computed = (
        estimate(tmp_path, source, *arguments, memory=1 << 30, compute=how) for how in (False, True)
    )
    assert small["guesses"] == [] and "done" in computed["printed"]
    assert small["peak_allocated"] == computed["peak_allocated"]
    assert small["peak_reserved"] == computed["peak_reserved"]


def test_a_request_that_makes_no_sense_is_refused_before_anything_runs(tmp_path):
    given = {"argv": ["train.py"], "answer": str(tmp_path / "answer.json"), "memory": 1 << 30}
    for wrong, word in (
        ({"color": 1}, "color"),
        ({"backend": "x"}, "backend"),
        ({"shorten": "x"}, "shorten"),
        ({"argv": []}, "argv"),
    ):
        path = tmp_path / "request.json"
        path.write_text(json.dumps(given | wrong))
        with pytest.raises(ValueError, match=word):
            request.read(str(path))
