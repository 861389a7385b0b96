"""The doctor where there is a device, and the facts about torch that it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memopt

ROOT = Path(__file__).resolve().parents[2]


def test_an_active_simulated_device_is_told_from_a_real_one():
    topics = {finding.topic: finding for finding in memopt.doctor().findings}
    assert topics["cuda driver"].state == topics["device 0"].state == topics["torch"].state == "ok"
    assert (
        "simulated" in topics["device 0"].text.lower() and "compute capability 8.0" in topics["device 0"].text
    )
    assert "active in this process" in topics["simulated device"].text


def test_a_torch_without_nvidias_libraries_is_no_fault_where_the_simulated_device_is_ready():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MEMOPT_", "PYTORCH_"))
    }
    command = [sys.executable, "-m", "memopt", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    topics = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert topics["simulated device"]["state"] == "ok"
    # Ours lack NVIDIA's; whoever runs this on a torch that has them, or on a GPU, has nothing to be told.
    assert topics["torch"]["state"] in ("absent", "ok") and done.returncode == 0
    if topics["torch"]["state"] == "absent":
        assert "libcu" in topics["torch"]["text"] and "simulated device alone" in topics["torch"]["text"]


@pytest.mark.parametrize("old", [True, False])
def test_torch_obeys_the_older_name_of_its_allocator_settings(old):
    code = (
        "from memopt import sim; sim.activate(); import torch; x = torch.ones(8, device='cuda'); "
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{old}",
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{not old}",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert done.stdout.strip() == str(old), done.stderr


def test_buffers_that_nccl_cannot_register_are_told_under_memopts_allocator_alone(run_script):
    done = run_script(
        """
import os
import memopt.sim
memopt.sim.activate(memory="256MiB", blank=True)
import torch, memopt
topics = lambda: [finding.topic for finding in memopt.doctor().findings]
os.environ["NCCL_GRAPH_REGISTER"] = "1"
assert "nccl" not in topics()
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
torch.empty(1, device="cuda")
assert "nccl" in topics() and not memopt.doctor().healthy
os.environ["NCCL_GRAPH_REGISTER"] = "0"
assert "nccl" not in topics()
"""
    )
    assert done.returncode == 0, done.stderr
