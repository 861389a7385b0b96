"""torchrun, two ranks, one of which runs out of memory: its report says which one, and nobody hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from environment_python import ROOT, python_of

SCRIPT = """
import memopt.sim
memopt.sim.activate(memory="96MiB", context="8MiB")
import torch
import torch.distributed as dist
import memopt

memopt.enable()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
kept = []
while dist.get_rank() == 1:
    kept.append(torch.ones(1 << 20, device="cuda"))
dist.barrier()  # rank 1 never comes
"""


@pytest.mark.sampled("several processes")
def test_the_report_names_the_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # --standalone: the port is a free one. The ranks run in the environment that has a device.
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [sys.executable, *command, python_of("sim"), str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # a hang; a busy host may take minutes
    )
    assert done.returncode == 1, done.stderr
    reports = [line for line in done.stderr.splitlines() if "CUDA out of memory at " in line]
    assert len(reports) == 1, done.stderr
    assert "memopt [rank 1 of 2]: CUDA out of memory at train.py:13 (kept.append(" in reports[0]
    assert "kept[*] 80.0 MiB (train.py:13)" in done.stderr
