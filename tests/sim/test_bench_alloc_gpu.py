"""The benchmark for a real GPU, on the simulated one: it measures all it names, and passes for no result."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import bench_alloc_gpu, harness
from benchmarks.bench_alloc_gpu import ROOT

SIM = {"memory": "1GiB", "blank": True}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bench_alloc_gpu.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


@pytest.mark.sampled("whole benchmarks")
def test_all_of_it_runs_on_the_simulated_device_and_says_so(tmp_path):
    output = tmp_path / "result.json"
    done = run(
        "--simulated",
        "--quick",
        "--workloads",
        "gnn",
        "--scale",
        "0.1",
        "--steps",
        "4",
        "--allocators",
        "native",
        "memopt",
        "-o",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    assert "SIMULATED DEVICE" in done.stdout
    result = json.loads(output.read_text())
    assert result["notes"]["simulated"] is True
    assert result["environment"]["simulated"] is True
    figures = {figure["case"]: figure["values"] for figure in result["figures"]}
    assert set(figures["held, gnn"]) == {"native", "memopt"}
    assert all(held >= 1 for held in figures["held, gnn"].values())
    assert {entry["case"] for entry in result["comparisons"]} > {"torch.empty and del, 4 KiB"}


@pytest.mark.parametrize("where", [["-o", str(harness.RESULTS / "x.json")], []])
def test_what_is_simulated_is_never_a_result(where):
    before = sorted(harness.RESULTS.rglob("*"))
    done = run("--simulated", *where)
    assert done.returncode == 2
    assert "measures no GPU" in done.stderr
    assert sorted(harness.RESULTS.rglob("*")) == before


def test_without_a_gpu_it_says_so():
    done = run("--quick")
    assert done.returncode == 2
    assert "driver" in done.stderr
    assert "measures a real GPU" in done.stderr
