"""memopt.compress: what a report says was saved is what the kernel says of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

MEASURE = """
import gc, json, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from memopt import compress

torch.set_num_threads(1)

def resident():
    gc.collect()
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

def layers(width, count):
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])

def zeroed(width, count):
    model = layers(width, count)
    for p in model.parameters():
        p.data[torch.rand(width, width) < 0.9] = 0.0
    return model

found = {}
def case(name, make, change):
    change(make(64))  # what is loaded and kept at first use is none of it
    model = make(1500)
    before = resident()
    report = change(model)
    found[name] = (before - resident(), report.saved_bytes, report.before.memory_bytes)

case("sparsify_", lambda n: zeroed(n, 8), lambda m: compress.sparsify_(m, "csr"))
case("prune_", lambda n: layers(n, 4), lambda m: compress.prune_(m, method="2:4"))
case("tie_", lambda n: layers(n, 8), lambda m: compress.tie_(m, [("0", str(i)) for i in range(1, 8)]))
case("teacher", lambda n: layers(n, 8), lambda m: compress.DistillationLoss(m).report)
batches = []
def pack(batch):
    batches.append(compress.pack_inputs(batch[0]))
    del batch[:]
    return batches[-1].report
case("pack_inputs", lambda n: [torch.rand(8 * n, n)], pack)
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_falls_by_what_the_reports_say():
    """Freed memory is given back at once where each allocation is a mapping of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        timeout=600,  # a hang; a busy host may take minutes
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["prune_"][1] == 0 and found["tie_"][1] == 7 * 1500 * 1500 * 4
    for name, (fell, saved, before) in found.items():
        assert abs(fell - saved) < before / 10, (name, found)
