"""`memopt gpu-check` on the simulated device: every part runs, and reports the fault that is planted for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memopt
from memopt import sim
from memopt._gpu_check import check_report, parts
from memopt._gpu_check.check_report import CheckReport, PartResult
from memopt._gpu_check.processes import PARTS, check

SIM = {"memory": "1GiB"}
ROOT = Path(__file__).resolve().parents[2]


def request(part: str, contender: str = "") -> parts.PartRequest:
    return parts.PartRequest(part, quick=True, simulated=True, contender=contender)


@pytest.fixture
def computing():
    with sim.Compute():
        yield


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "memopt", "gpu-check", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=ROOT)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_every_part_is_right_on_the_simulated_device(tmp_path):
    file = tmp_path / "report.json"
    done = command("--simulated", "-o", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = check_report.read(str(file))
    assert [(part.part, part.status) for part in found.parts] == [(name, "ok") for name in PARTS]
    assert found.simulated and found.passed
    assert str(found) in done.stdout and "simulated" in done.stdout
    for part in found.parts:
        assert part.figures and part.seconds > 0
    again = command("-o", str(file))
    assert again.returncode == 2 and "exists" in again.stderr
    shown = command("--compare", str(file), str(file))
    assert shown.returncode == 0 and "| kernels | ok | ok |" in shown.stdout


def test_a_machine_without_a_gpu_is_no_success():
    done = command("--parts", "kernels")
    assert done.returncode == 1 and "| environment | not here |" in done.stdout
    assert "kernels" not in done.stdout


def test_a_part_that_there_is_not_is_refused():
    done = command("--parts", "anything")
    assert done.returncode == 2 and "anything" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 99, "parts": []}', '{"version": 1, "parts": [{}]}', "\xff"]
)
def test_what_is_no_report_is_refused(tmp_path, text):
    file = tmp_path / "report.json"
    file.write_bytes(text.encode("latin-1"))
    done = command("--compare", str(file), str(file))
    assert done.returncode == 2 and "report" in done.stderr and "Traceback" not in done.stderr


def test_a_comparison_has_what_differs():
    one = CheckReport([PartResult("driver", "ok", figures={"map": 2.0, "same": 1.0})], False)
    two = CheckReport([PartResult("driver", "slow", figures={"map": 3.0, "same": 1.0})], False)
    assert check_report.compared(one, two).splitlines()[2:] == [
        "| driver | ok | slow |",
        "| map | 2 | 3 (1.50×) |",
    ]


def test_a_part_whose_process_ends_is_wrong(monkeypatch):
    monkeypatch.setattr("memopt._gpu_check.processes.MODULE", "memopt._gpu_check.check_report")
    (found,) = check(["environment"], quick=True, simulated=True).parts
    assert found.status == "wrong" and "without an answer" in found.text


# ---- planted faults --------------------------------------------------------------------------------------------------


def test_a_kernel_that_is_off_by_one_bit_is_wrong(monkeypatch, computing):
    trained = parts._trained

    def off(make, values, dtype, device):
        found = trained(make, values, dtype, device)
        if device == "cuda":
            found[0].view(torch.uint8)[0] ^= 1
        return found

    assert parts.kernels(request("kernels")).status == "ok"
    monkeypatch.setattr(parts, "_trained", off)
    assert parts.kernels(request("kernels")).status == "wrong"


def test_a_norm_that_is_off_is_wrong(monkeypatch, computing):
    clip = memopt.amp.clip_grad_norm_
    monkeypatch.setattr(memopt.amp, "clip_grad_norm_", lambda *given: clip(*given) * (1 + 1e-5))
    assert "norm" in parts.kernels(request("kernels")).text


def test_a_block_that_is_written_while_another_stream_reads_it_is_wrong(run_script):
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt._gpu_check import parts
fill = torch.Tensor.fill_
torch.Tensor.fill_ = lambda block, value: fill(block, value + (value == 7))
with memopt.sim.Compute():
    found = parts.streams(parts.PartRequest("streams", True, True))
assert found.status == "wrong" and found.text.startswith("1 of 200 blocks"), found
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_call_of_the_driver_that_fails_is_wrong():
    sim.fail("cuMemMap", after=3, count=1)
    found = parts.driver(request("driver"))
    sim.fail_clear()
    assert found.status == "wrong" and "cuMemMap" in found.text
    assert sim.stats()["handles"] == 0


def test_losses_that_differ_and_memory_that_stays_are_wrong():
    losses = {name: [1.0, 2.0] for name in parts.CONTENDERS}
    figures = {f"{name}: bytes held at the end": 0 for name in parts.CONTENDERS}
    assert parts._judged(losses, figures).status == "ok"
    assert "memopt" in parts._judged({**losses, "memopt": [1.0, 2.5]}, figures).text
    assert "memopt" in parts._judged(losses, {**figures, "memopt: bytes held at the end": 1 << 21}).text


def test_a_block_that_is_left_is_held_at_the_end(computing):
    left = torch.ones(1 << 20, device="cuda")
    assert parts.loop(request("loop", "native"))["bytes held at the end"] > 0
    del left
    assert parts.loop(request("loop", "native"))["bytes held at the end"] == 0


def test_a_peak_that_is_not_as_predicted_is_wrong(monkeypatch, computing):
    monkeypatch.setattr(
        memopt, "estimate", lambda *_, **__: SimpleNamespace(allocated=(1 << 20, 2 << 20), method="planted")
    )
    found = parts.estimate(request("estimate"))
    assert found.status == "wrong" and "off by" in found.text
