"""The examples of benchmarks/scripts/distributed, as torchrun starts them. The long form: each is two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.environ.get("MEMOPT_SOAK") != "1", reason="the long form")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_an_example_trains(name: str, ranks: int):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         f"benchmarks/scripts/distributed/{name}.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = re.search(r"(accuracy|loss) ([\d.]+)", done.stdout)
    assert told is not None, done.stdout
    assert float(told[2]) > 0.9 if told[1] == "accuracy" else float(told[2]) < 0.6
