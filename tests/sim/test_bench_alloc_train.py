"""The benchmark that finds what training loops need of a device: it finds the smallest, and counts what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_alloc_train
from benchmarks.bench_alloc_train import (
    ALLOCATORS,
    LAUNCH_NS,
    PRECISION,
    ROOT,
    Runs,
    measure,
    moved,
    price_of,
    price_of_a_launch,
    probe,
)
from benchmarks.roofline import BYTES_A_SECOND, FLOPS_OTHERWISE, Roofline
from memopt import sim

SIM = {"memory": "1GiB", "blank": True}
LIVE = 1_000_000


class Pretended:
    """A child whose loop completes on `needs` bytes and more, and holds `holds` where there is plenty."""

    allocator = "pretended"

    def __init__(self, needs: int, holds: int) -> None:
        self.needs, self.holds, self.asked = needs, holds, list[int]()

    def ask(self, memory: int, **request: Any) -> dict[str, Any]:
        self.asked.append(memory)
        completed = memory >= self.needs
        return {
            "completed": completed,
            "message": None if completed else f"{memory} is too little",
            "steps": 4,
            "seconds": 1.0,
            "held": min(memory, self.holds),
            "live_peak": LIVE,
            "last_steps": {"cudaMalloc": 6},
            "all_steps": {"cudaMalloc": 12},
        }


@pytest.mark.parametrize("needs", [LIVE, LIVE + 1, 1_012_345, 1_499_999, 1_500_000, 1_600_000])
def test_the_frontier_is_found_to_a_thousandth(needs):
    child = Pretended(needs, holds=1_500_000)
    found = measure(child, "any", 1.0, None, True, 0)
    assert needs <= found["frontier"] <= needs + PRECISION * LIVE + 1
    assert found["held"] == 1_500_000
    assert min(child.asked) >= LIVE - 1
    assert found["plenty"]["last_steps"] == {"cudaMalloc": 2}
    assert found["at_frontier"]["all_steps"] == {"cudaMalloc": 3}
    assert found["at_103_percent"]["completed"] == (needs <= 1.03 * LIVE)


def test_a_loop_that_no_device_carries_is_an_error():
    with pytest.raises(RuntimeError, match="ran out of"):
        measure(Pretended(1 << 60, holds=1), "any", 1.0, None, True, 0)


def test_granules_moved_are_maps_beyond_the_first_of_each():
    assert moved({"cuMemMap": 12, "created": 10, "cuMemCreate": 11}) == 2
    assert moved({"cuMemMap": 9, "created": 10}) == 0  # one could not be used


def test_finished_runs_are_found_again_and_a_torn_one_is_not(tmp_path):
    log, result = tmp_path / "log.jsonl", tmp_path / "result.json"
    result.write_text(json.dumps({"notes": {"runs": {"gnn": {"native": {"key": "old", "frontier": 1}}}}}))
    Runs(log, result, resume=True).put({"key": "new", "frontier": 2})
    log.write_text(log.read_text() + '{"key": "torn", "fron')
    again = Runs(log, result, resume=True)
    assert [again.get(key) and again.get(key)["frontier"] for key in ("old", "new", "torn")] == [1, 2, None]
    again.put({"key": "later", "frontier": 3})
    assert Runs(log, result, resume=True).get("later")["frontier"] == 3
    assert Runs(log, result, resume=False).get("new") is None


def test_an_operation_takes_what_its_operations_or_its_bytes_take_whichever_is_more():
    a, b = torch.zeros(2048, 2048, device="cuda"), torch.zeros(2048, 2048, device="cuda")
    with Roofline() as product:
        a @ b
    assert product.flops == 2 * 2048**3
    assert product.bytes == 3 * a.nbytes
    assert product.seconds == pytest.approx(2 * 2048**3 / FLOPS_OTHERWISE)
    with Roofline() as found:
        c = a.detach().view(-1)[:1024]  # parts of it, and memory that nothing is written to
        torch.empty_like(a)
    assert found.bytes == found.seconds == 0
    with Roofline() as found:
        a.add_(1)
        b[0].expand(2048, 2048).sum()
    assert found.bytes == 2 * a.nbytes + b.nbytes + 4
    assert found.seconds == pytest.approx(found.bytes / BYTES_A_SECOND)
    with Roofline() as found:
        (torch.ones(4, device="cuda", requires_grad=True) * 2).sum().backward()
    assert found.bytes > 16 + 32 + 20  # of ones, mul and sum: autograd has operations too
    del c


def test_a_launch_is_priced_so_that_a_loops_launches_take_what_its_operations_do():
    found = price_of_a_launch("gnn", 0.05, 2)
    assert found["launches"] > 0 and found["flops"] > 0
    total = (found["kernel"] - LAUNCH_NS) * found["launches"] * 1e-9
    assert total == pytest.approx(found["seconds"], abs=found["launches"] * 1e-9)


def test_a_steps_virtual_time_is_its_launches_where_the_host_is_ahead():
    kernel = 50_000  # ns: far more than the calls of a launch
    first = probe("gnn", 1 << 30, 0.05, 6, kernel)
    assert first["completed"] and first["steps"] == 6
    again = probe("gnn", 1 << 30, 0.05, 6, 2 * kernel)
    assert again["step_ns"] == pytest.approx(2 * first["step_ns"], rel=0.01)
    sim.price("kernel", 5000)
    assert price_of({"cuMemMap": 3, "cuMemCreate": 2, "cudaEventRecord": 100}) == 3 * 2000 + 2 * 29000


@pytest.mark.sampled("whole benchmarks")
def test_the_peers_are_told_apart_by_a_real_run(tmp_path: Path):
    output = tmp_path / "result.json"
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    peers = [name for name, one in ALLOCATORS.items() if not one.memopt and one.torch <= version]
    command = [sys.executable, bench_alloc_train.__file__, "--workloads", "gnn", "--allocators", *peers]
    command += ["--only", "memory", "--scale", "0.25", "--steps", "4", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    runs = json.loads(output.read_text())["notes"]["runs"]["gnn"]
    assert len({run["live_peak"] for run in runs.values()}) == 1
    for run in runs.values():
        assert run["live_peak"] == run["own_live_peak"] <= run["frontier"] <= run["held"]
    assert "cudaMalloc" in runs["native"]["at_frontier"]["all_steps"]
    for name in set(peers) - {"native"}:
        calls = runs[name]["at_frontier"]["all_steps"]
        assert "cudaMalloc" not in calls
        assert calls["cuMemMap"] >= calls["created"] > 0
