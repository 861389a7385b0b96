"""memopt.backward where ranks run out of memory: processes of their own, which talk by gloo. What each of them checks
is in isolated/micro_batch_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

CASES = {
    2: ["data_parallel", "gradients_at_entry", "views_of_buckets", "unused_parameters", "one_sample_does_not_fit",
        "an_error_of_ones_own", "a_model_that_nobody_needs_is_freed", "refused", "sharded", "a_rank_that_never_comes"],
    4: ["data_parallel"],
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def run(ranks: int, cases: list[str], folder: Path, **environment: str) -> list[list[str]]:
    """The output of each rank."""
    script = str(ROOT / "tests/isolated/micro_batch_ranks.py")
    surroundings = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(folder / "meeting"), *cases],
            cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (out, err) in enumerate(said):
        ended = [line for line in out.splitlines() if line.endswith(" ok")]
        assert ended == [f"{case} ok" for case in cases], f"rank {rank}: {out}{err[-3000:]}"
    return [out.splitlines() for out, _ in said]


@pytest.mark.sampled("several processes")
@pytest.mark.parametrize("ranks", CASES)
def test_ranks(ranks: int, tmp_path: Path):
    run(ranks, CASES[ranks], tmp_path)


@pytest.mark.sampled("several processes")
@pytest.mark.parametrize(
    ("where", "stays"),
    [
        ("between", 0),
        *([("before", 0), ("backward", 0), ("between", 80)] if os.environ.get("MEMOPT_SOAK") == "1" else []),
    ],
)
def test_a_rank_that_runs_out_within_fsdp_ends_all_with_the_same_error(
    where: str, stays: int, tmp_path: Path
):
    said = run(2, ["sharded_runs_out"], tmp_path, WHERE=where, STAYS=str(stays))
    assert said[0] == said[1] and "rank 1 ran out of memory within a step under FSDP2" in said[0][0]
    assert "planted" in said[0][0]
