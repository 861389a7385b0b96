"""Everything of memopt's in models of several processes, which talk by gloo, against one process: what each rank checks
is in isolated/parallel_ranks.py. The short form is two ranks and each way to train once; the long one four, and all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LONG = os.environ.get("MEMOPT_SOAK") == "1"

PARTS = ["frozen_stages", "spread_too_late", "other_norms"]
CASES = [(2, "short", ["ddp", "fsdp", "tensor_parallel", "pipeline", *PARTS])]
if LONG:
    CASES += [
        (4, "long", [kind]) for kind in ("ddp", "fsdp", "tensor_parallel", "two_dimensions", "pipeline")
    ]
    CASES += [(4, "long", PARTS), (3, "short", ["ddp", "fsdp", *PARTS])]


@pytest.mark.sampled("several processes")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize(("ranks", "form", "cases"), CASES)
def test_ranks_train_as_one_process_does(ranks: int, form: str, cases: list[str], tmp_path: Path):
    script = str(ROOT / "tests/isolated/parallel_ranks.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(tmp_path / "meeting"), form, *cases],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=1500) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (out, err) in enumerate(said):
        assert out.splitlines() == [f"{case} ok" for case in cases], f"rank {rank}: {out}{err[-3000:]}"
