"""benchmarks/kernel_slots.py: what it counts is what the kernels' arrays and instructions say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

import ptx_to_c
from kernel_library import build_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("operation", "slots"),
    [
        ("div.rn.f32", 9),
        ("sqrt.rn.f32", 8),
        ("ex2.approx.ftz.f32", 1),
        ("mad.lo.s64", 2),
        ("mul.wide.u32", 1),
        ("ld.global.v2.u64", 1),
        ("mov.b32", 0),
        ("ret", 1),
    ],
)
def test_slots_of_an_instruction(operation: str, slots: int) -> None:
    assert ptx_to_c.slots_of(operation) == slots


@pytest.mark.sampled("whole benchmarks")
@pytest.mark.skipif(build_kernels.find_nvcc() is None, reason="there is no nvcc")
def test_each_kernel_is_counted(tmp_path: Path) -> None:
    output = tmp_path / "slots.json"
    command = [sys.executable, str(ROOT / "benchmarks/kernel_slots.py"), "--quick", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    notes = json.loads(output.read_text())["notes"]
    assert set(notes["sm_90: registers, bytes spilled"]) == {
        "cross_entropy",
        "factored",
        "gradients",
        "update",
        "widen",
    }
    for name, row in notes["cases"].items():
        # Bytes an element from the cache: the constants of a channel where each element has another, and scales that
        # all lanes of a warp read; logits are read twice.
        cached = 1 if name.endswith(("8 bits", "4 bits", "channels last")) else 0
        cached = cached / 2 if "SGD" in name else cached  # of one state
        cached = row["bytes"] / 2 if name.startswith("cross entropy") else cached
        # Of a factored second moment a column's average for each element, and a row's for eight; the sums of tiles.
        cached = 5.5 if "factored, " in name else 0.4 if name.startswith("factored") else cached
        assert row["accessed"] == pytest.approx(row["bytes"] + cached, abs=0.3), name
    fp32 = notes["cases"]["update AdamW fp32"]
    # A load or store moves 4 elements, so 7 of them are 1.75 slots; a division and a root are 17.
    assert 18.75 < fp32["sm_90"]["slots"] < fp32["sm_90"]["budget"] and fp32["in 16"] > 0.99
    assert notes["cases"]["update SGD fp32, momentum"]["sm_90"]["slots"] < fp32["sm_90"]["slots"] - 17
