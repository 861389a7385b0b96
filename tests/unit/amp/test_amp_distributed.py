"""memopt.amp.GradScaler where ranks find different things: processes of their own, which talk by gloo. What each of
them checks is in isolated/amp_ranks.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

CASES = {
    2: ["agreement", "alone", "sharded", "fsdp"],
    3: ["without_gradients", "groups", "fsdp"],
    4: ["agreement"],
}


@pytest.mark.sampled("several processes")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("ranks", CASES)
def test_ranks(ranks: int, tmp_path: Path):
    script = str(ROOT / "tests/isolated/amp_ranks.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(tmp_path / "meeting"), *CASES[ranks]],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (out, err) in enumerate(said):
        assert out.splitlines() == [f"{case} ok" for case in CASES[ranks]], f"rank {rank}: {out}{err[-3000:]}"
