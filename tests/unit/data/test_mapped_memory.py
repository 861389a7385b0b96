"""An epoch over a mapped file takes the memory of a batch, however large the file is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
MIB = 1 << 20


def epoch(file, mebibytes, workers):
    program = str(ROOT / "tests/helpers/mapped_epoch.py")
    done = subprocess.run(
        [sys.executable, program, str(file), str(mebibytes), str(workers)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rows read once"] == told["rows"]
    assert told["file, bytes on the disk"] >= told["file, bytes"] > mebibytes * MIB  # no holes
    return told


def test_an_epoch_takes_no_memory_of_the_files_size(tmp_path):
    told = epoch(tmp_path / "rows.safetensors", 192, 0)
    assert told["RssAnon + RssShmem at most"]["main"] - told["own before the epoch"] < 96 * MIB
    assert told["RssFile at most"]["main"] > 192 * MIB


@pytest.mark.skipif(not SOAK, reason="the long form: a file of 10 GiB, by MEMOPT_SOAK=1")
def test_an_epoch_over_ten_gibibytes_stays_under_300_mib():
    told = {}
    for workers in (0, 2):
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("MEMOPT_SOAK_DIR")))
        try:
            if shutil.disk_usage(folder).free < 12 << 30:
                pytest.skip(f"{folder} has less than 12 GiB free; MEMOPT_SOAK_DIR= names another folder")
            told[f"{workers} workers"] = epoch(folder / "rows.safetensors", 10240, workers)
        finally:
            shutil.rmtree(folder)
    report = ROOT / "benchmarks/results/soak_mapped_epoch.json"
    report.write_text(json.dumps(told, indent=1) + "\n")
    for found in told.values():
        assert all(own < 300 * MIB for own in found["RssAnon + RssShmem at most"].values()), found
