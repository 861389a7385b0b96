"""The benchmark for a real GPU, on the simulated one: it measures all it names, and passes for no result."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import bench_alloc_gpu, harness
from benchmarks.bench_alloc_gpu import ROOT, Driver, map_once, use_events
from memopt import sim

SIM = {"memory": "1GiB", "blank": True}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bench_alloc_gpu.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


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
    for call in "AddressReserve Create Map SetAccess Unmap Release AddressFree".split():
        assert len(figures[f"cuMem{call}"]) == 4
        assert all(value > 0 for value in figures[f"cuMem{call}"].values())
    assert {"cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"} < set(figures)
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
    assert "no NVIDIA driver" in done.stderr or "finds no GPU" in done.stderr
    assert "measures a real GPU" in done.stderr


def test_calls_are_counted_and_nothing_is_left_of_them():
    driver = Driver()
    for whole, pieces in ((False, 10), (True, 1)):
        before = {
            name: sim.calls(name) for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")
        }
        map_once(driver, 10, whole, {})
        made = {name: sim.calls(name) - count for name, count in before.items()}
        assert made == {"cuMemCreate": 10, "cuMemMap": 10, "cuMemSetAccess": pieces, "cuMemUnmap": pieces}
    use_events(driver, 10, {})
    assert sim.stats()["bytes"] == sim.stats()["handles"] == 0
    driver.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_call_that_fails_ends_it_with_its_name_and_nothing_is_left(call, after):
    driver = Driver()
    sim.fail(call, after=after, count=1)
    with pytest.raises(RuntimeError, match=call):
        map_once(driver, 10, False, {})
    sim.fail_clear()
    assert sim.stats()["bytes"] == sim.stats()["handles"] == 0
    driver.close()


def test_a_device_that_is_too_small_is_named():
    driver = Driver()
    with pytest.raises(RuntimeError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY, with 5.. of 1000 handles"):
        map_once(driver, 1000, False, {})
    assert sim.stats()["bytes"] == 0
    driver.close()
