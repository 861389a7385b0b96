"""`python -m memopt estimate` on real scripts, with the child that runs them on the simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
pytestmark = pytest.mark.sampled("estimates as processes")
TRAIN = """\
import argparse
import os
import torch

if (pid := os.fork()) == 0:
    os._exit(7)
print("a child of its own ends with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4096)
size = parser.parse_args().batch_size
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    hidden = model(torch.ones(size, 1024, device="cuda"))
    loss = hidden.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""


@pytest.fixture
def estimate(request, tmp_path):
    """Runs the command as a user does; returns its exit code, its JSON, what went to standard error."""
    python = request.config.getoption("--sim-python")

    def run(script, *options, arguments=()):
        path = tmp_path / "train.py"
        path.write_text(script)
        line = [sys.executable, "-m", "memopt", "estimate", "--json", "--python", python, *options, str(path)]
        done = subprocess.run(
            [*line, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    return run


def test_a_script_is_estimated_and_where_it_does_not_fit_the_line_is_named(estimate):
    status, found, said = estimate(TRAIN, "--quick", "--gpu", "24GiB", "--context", "0")
    assert status == 0 and found["verdict"] == "fits" and found["steps"] == 4
    weight, layer = 4 * MIB, 16 * MIB
    # The first of a backward pass: parameters, all that is saved, gradients on the way, cuBLAS's workspaces.
    assert 8 * weight + 9 * layer <= found["allocated_bytes"][0] <= 16 * weight + 12 * layer + 17 * MIB
    assert found["by_category"]["parameters"] == 8 * weight
    # Categories are of what was asked for, the peak is of blocks.
    assert sum(found["by_category"].values()) == pytest.approx(found["allocated_bytes"][0], rel=1e-4)
    assert any(line["name"].endswith("train.py:14") for line in found["by_line"])
    assert [guess["where"].rsplit(":", 1)[1] for guess in found["guesses"]] == ["19"]
    assert said.count("loss") == 4  # of a hundred steps, the last one among them
    assert said.count("a child of its own ends with 7") == 1

    card = found["allocated_bytes"][0] * 9 // 10
    status, tight, _ = estimate(TRAIN, "--quick", "--gpu", str(card), "--context", "0")
    assert status == 1 and tight["verdict"] == "does not fit"
    assert tight["oom"]["line"] in (14, 15, 16) and tight["oom"]["asked"] > 0
    assert tight["allocated_bytes"][0] == found["allocated_bytes"][0]


def test_a_script_that_fails_is_no_answer_but_what_was_seen_is_told(estimate):
    start = "import torch\nx = torch.ones(1 << 20, device='cuda')\n"
    status, found, said = estimate(start + "1 / 0\n", "--quick")
    assert status == 2 and found is None
    assert "ZeroDivisionError" in said and "until then: 4.00 MiB allocated" in said


NOTHING = {
    "it never gets to the card": "print('no data')",
    "it takes no step": "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\nmodel(torch.zeros(1, 8).cuda())",
    "as a rank": "import torch, sys\nsys.exit(0 if torch.cuda.device_count() < 8 else 1)",
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_script_that_takes_no_step_is_nothing_to_tell(estimate, name):
    ranks = ["--nproc", "2"] if name == "as a rank" else []
    status, found, said = estimate(NOTHING[name], "--quick", "--gpu", "8GiB", *ranks)
    assert (status, found) == (2, None) and "no result" in said
    if name == "it takes no step":
        status, found, _ = estimate(NOTHING[name], "--quick", "--gpu", "8GiB", "--steps", "0")
        assert (status, found["verdict"]) == (0, "fits")


EVALUATES = """\
import torch
from torch.utils.data import DataLoader
print("begins")
model = torch.nn.Linear(256, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
answers = []
with torch.no_grad():
    for rows in DataLoader(range(1, 41)):
        answers.append(model(torch.ones(int(rows), 256).cuda()).cpu())
assert len(torch.cat(answers)) == 820, "not all of them"
torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
"""


def test_a_script_that_needs_its_whole_evaluation_is_run_again_with_it(estimate):
    status, found, said = estimate(EVALUATES, "--quick", "--gpu", "8GiB")
    assert status == 0 and found["steps"] == 4 and found["allocated_bytes"][0] > 64 * MIB
    assert said.count("begins") == 2 and "not all of them" in said
    assert "the script ran to its end" in found["covered"][0]


def test_of_a_script_that_needs_all_of_its_steps_the_rest_is_not_seen(estimate):
    whole = EVALUATES.replace('"not all of them"', '"not all"').replace("== 820", "== 820 and taken == 1000")
    whole = whole.replace("optimizer.step()", "optimizer.step(); taken = step and taken + 1 or 1")
    status, found, said = estimate(whole, "--quick", "--gpu", "8GiB")
    assert (status, found["verdict"]) == (1, "unsure") and said.count("begins") == 3
    assert found["allocated_bytes"][0] < 64 * MIB
    assert "what follows was not seen" in found["covered"][0] and "AssertionError" in found["covered"][1]


def test_without_a_cuda_build_fake_tensors_answer_and_say_that_they_are_the_weaker_way(tmp_path):
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.version.cuda)"], capture_output=True, text=True
    )
    if version.stdout.strip() != "None":
        pytest.skip("this torch is a CUDA build")
    (tmp_path / "train.py").write_text(
        TRAIN.replace("loss.item())", "loss.item())\n    assert loss.isfinite()")
    )
    line = [sys.executable, "-m", "memopt", "estimate", "--gpu", "24GiB"]
    done = subprocess.run(
        [*line, "--json", str(tmp_path / "train.py")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["method"] == "fake tensors" and found["verdict"] == "fits" and found["steps"] == 3
    assert found["covered"] == ["3 steps, then it was ended: what follows was not seen"]
    assert found["by_category"]["parameters"] == 8 * 4 * MIB
    low, high = found["allocated_bytes"]
    assert low < 8 * 4 * MIB + 10 * 16 * MIB < high
    assert any("CPU build of torch" in text for text in found["unmodelled"])
    (tmp_path / "train.py").write_text("raise KeyError('no data')\n")
    done = subprocess.run(
        [*line, str(tmp_path / "train.py")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2 and "KeyError: 'no data'" in done.stderr
    # What fake tensors cannot do is told in a line, with the remedy.
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(4, device='cuda').nonzero()\n")
    done = subprocess.run(
        [*line, str(tmp_path / "train.py")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip install --no-deps 'torch===" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("way", ["simulated", "fake tensors"])
def test_options_behind_the_script_are_told_of_where_it_refuses_them(way, tmp_path, request):
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    python = ["--python", request.config.getoption("--sim-python")] if way == "simulated" else []
    line = [sys.executable, "-m", "memopt", "estimate", *python, "script.py", "--gpu=24GiB", "--mine"]
    done = subprocess.run(
        line,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = "memopt estimate: the script was given --gpu: options of memopt come before SCRIPT"
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == said
