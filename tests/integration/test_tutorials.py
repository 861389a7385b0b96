"""The tutorials' programs, as their pages print them: a notebook's cells in a kernel, and a job of two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from environment_python import python_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.sampled("programs of the documentation")
TUTORIALS = ROOT / "docs/tutorials"


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)\n```", (TUTORIALS / page).read_text(), re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
    }


def test_the_cells_of_the_notebook_session_run() -> None:
    text = (TUTORIALS / "notebook_session.md").read_text()
    first = re.search(r"`(import memopt\.sim; [^`]*)`", text)
    assert first
    done = subprocess.run(
        [python_of("notebook"), str(ROOT / "tests/tooling/run_cells.py")],
        input=json.dumps([first[1], *programs("notebook_session.md")]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,  # a hang
    )
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    errors = [one for cell in outputs for one in cell if one["output_type"] == "error"]
    assert not errors, errors
    shown = ["".join(one.get("text", "") or one["data"]["text/plain"] for one in cell) for cell in outputs]
    cell, status, fit, trained, code = shown[3:]
    assert re.search(r"top lines +In\[\d+\]:2 \d", cell), cell  # the line of model(x)
    assert "cuda:0" in status
    assert "160 MiB" in fit and fit.count("fits")
    assert re.fullmatch(r"(\d\.\d{4}\n){3}", trained), trained
    assert "memopt." in code


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_two_ranks_follow_the_plan_that_was_made_for_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs("eight_gpus.md")[0])
    page = (TUTORIALS / "eight_gpus.md").read_text()
    (fit,) = re.findall(r"^    python (.* fit -o .*)$", page, re.MULTILINE)
    (run,) = re.findall(r"^    torchrun --nproc-per-node 2 (.*)$", page, re.MULTILINE)
    python = python_of("sim")
    options = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    planned = subprocess.run([python, *shlex.split(fit)], env=environment(), timeout=1200, **options)
    assert planned.returncode == 0, planned.stderr
    # As torchrun starts them, which needs a torch that can be imported without the simulated device.
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [python, *shlex.split(run)],
            env=environment() | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **options,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=1200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    printed, said = ("".join(parts) for parts in zip(*told, strict=True))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[2] < losses[0]
    peaks = re.findall(r"rank \d: peak ([\d.]+ \w+) allocated, planned ([\d.]+ \w+)", said)
    assert len(peaks) == 2 and all(peak == plan for peak, plan in peaks), said
