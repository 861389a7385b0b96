"""A real training loop on the simulated device, through memopt's allocator, gives the CPU's losses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memopt
from benchmarks import first_light, harness
from memopt import sim

SIM = {"memory": "1GiB"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def result() -> first_light.Result:
    """Before all else in the process: once torch's own allocator has started, it can't be replaced."""
    return first_light.run(steps=40)


@pytest.mark.parametrize("precision", first_light.PRECISIONS)
def test_losses_equal_the_cpu_run_bit_for_bit(result: first_light.Result, precision: str) -> None:
    cpu, cuda = result.runs[precision]["cpu"], result.runs[precision]["cuda"]
    assert len(cpu.losses) == 40
    assert [loss.hex() for loss in cuda.losses] == [loss.hex() for loss in cpu.losses]
    assert cuda.scale == cpu.scale and cuda.accuracy_after == cpu.accuracy_after


@pytest.mark.parametrize("precision", first_light.PRECISIONS)
def test_the_model_learns_on_the_device(result: first_light.Result, precision: str) -> None:
    run = result.runs[precision]["cuda"]
    assert sum(run.losses[-5:]) / 5 < 0.6 * run.losses[0]
    assert run.accuracy_before < 0.2 and run.accuracy_after > 0.5


def test_fp16_really_ran_in_fp16(result: first_light.Result) -> None:
    assert result.runs["fp16"]["cuda"].losses != result.runs["fp32"]["cuda"].losses


def test_steps_that_overflow_are_skipped_on_both(result: first_light.Result) -> None:
    scales = {run.scale for run in result.runs["fp16"].values()}
    assert len(scales) == 1 and scales.pop() < first_light.FIRST_SCALE


def test_every_allocation_came_from_memopt_and_none_from_torch(result: first_light.Result) -> None:
    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    assert result.device["cudaMalloc"] == 0
    assert result.memopt["allocations"] > 1000
    assert result.device["cuMemAlloc"] == 0  # nor does torch ask for memory behind its back
    assert result.memopt["out_of_memory"] == 0
    assert result.device["bytes_peak"] >= result.memopt["peak_bytes"] > 2**20


def test_everything_is_freed_at_the_end(result: first_light.Result) -> None:
    assert result.memopt["live_blocks"] == result.memopt["live_bytes"] == 0
    assert result.memopt["frees"] == result.memopt["allocations"]
    assert result.memopt["failed_frees"] == result.device["faults"] == 0
    assert sim.stats()["allocations"] == memopt.cuda.memory_stats()["live_blocks"]


def test_a_good_result_has_no_disagreements(result: first_light.Result) -> None:
    assert result.disagreements() == []
    shown = first_light.screen(result, 40, 1.0)
    assert "bit for bit" in shown and "NOT EQUAL" not in shown


@pytest.mark.parametrize(
    ("counter", "holder", "value", "words"),
    [
        ("allocations", "memopt", 0, "never called"),
        ("cudaMalloc", "device", 3, "torch's own allocator"),
        ("live_blocks", "memopt", 1, "still holds"),
        ("failed_frees", "memopt", 1, "frees refused"),
        ("faults", "device", 1, "device faults"),
        ("live_allocations", "device", 1, "live allocations"),
    ],
)
def test_a_wrong_counter_is_named(
    result: first_light.Result, counter: str, holder: str, value: int, words: str
) -> None:
    wrong = replace(result, **{holder: {**getattr(result, holder), counter: value}})
    (found,) = wrong.disagreements()
    assert words in found


@pytest.mark.parametrize("planted", [1e-7, float("nan")])
def test_one_loss_that_differs_in_the_last_digit_is_found(result: first_light.Result, planted: float) -> None:
    wrong = copy.deepcopy(result)
    wrong.runs["fp16"]["cuda"].losses[7] += planted
    (found,) = wrong.disagreements()
    assert found.startswith("fp16: step 8")
    assert "NOT EQUAL" in first_light.screen(wrong, 40, 1.0)


def test_a_device_that_does_not_compute_disagrees(result: first_light.Result) -> None:
    """The control: without Compute kernels do nothing, and the comparison must notice."""
    idle = first_light.train("cuda", "fp32", steps=30)
    runs = {**result.runs, "fp32": {"cpu": first_light.train("cpu", "fp32", steps=30), "cuda": idle}}
    assert any("fp32: step" in line for line in replace(result, runs=runs).disagreements())


def test_the_exit_status_is_one_on_disagreement_and_two_where_it_cannot_run(
    result: first_light.Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_light.main([]) == 2  # torch is imported, the device active: no second activation
    assert "first light cannot run here" in capsys.readouterr().err
    monkeypatch.setattr(sim, "activate", lambda **settings: None)
    monkeypatch.setattr(first_light, "run", lambda steps, say: result)
    assert first_light.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disagreements"] == []
    wrong = replace(result, memopt={**result.memopt, "live_blocks": 1})
    monkeypatch.setattr(first_light, "run", lambda steps, say: wrong)
    assert first_light.main([]) == 1


def test_too_few_steps_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "first_light.py", "--steps", "5"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--steps 5" in done.stderr and "Traceback" not in done.stderr


def test_the_harness_times_by_events_and_says_the_device_is_simulated(tmp_path: Path) -> None:
    options = harness.parser("").parse_args(["--cuda", "-o", str(tmp_path / "r.json")])
    report = harness.Report("bench_test", options)
    a = torch.zeros(1 << 16, device="cuda")
    report.compare("copy", {"clone": a.clone, "copy": lambda: a.copy_(a)}, calls=3)
    assert report.finish() == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["comparisons"][0]["clock"] == "cuda"
    assert saved["environment"]["simulated"] is True and saved["environment"]["allocator"] == "pluggable"
