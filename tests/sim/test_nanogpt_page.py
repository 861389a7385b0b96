"""The changes that the page on nanoGPT shows, made to a trainer like it: it trains alike, in less memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memopt import _C

SIM = None  # the trainer has a process of its own
ROOT = Path(__file__).resolve().parents[2]
SMALL = "--batch-size 16 --block-size 64 --layers 4 --width 128 --vocabulary 500 --iterations 2".split()


def changed(script: str, diff: str) -> str:
    for hunk in diff.split("\n\n"):
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in kept) for kept in (" -", " +")
        )
        assert script.count(before) == 1, hunk
        script = script.replace(before, after)
    return script


def trained(folder: Path, script: str) -> tuple[float, int]:
    """The last loss, and the peak of the tensors."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "memopt", "run", "--sim", "2GiB", "train.py", *SMALL],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # a hang
    )
    assert done.returncode == 0, done.stderr
    peak = re.search(r"peak ([\d.]+ \w+)", done.stderr)
    assert peak, done.stderr
    return float(re.findall(r": loss ([\d.]+)", done.stdout)[-1]), _C.parse_size(peak[1].replace(" ", ""))


def test_the_changed_trainer_trains_alike_in_less_memory(tmp_path: Path) -> None:
    page = (ROOT / "docs/how_to/nanogpt.md").read_text()
    plain = (ROOT / "benchmarks/scripts/nanogpt.py").read_text()
    after = changed(plain, page.split("```diff\n")[1].split("\n```")[0])
    loss, peak = trained(tmp_path, plain)
    loss_after, peak_after = trained(tmp_path, after.replace("8GiB", "44MiB"))
    assert abs(loss_after - loss) < 0.02 * loss
    assert peak_after < 0.8 * peak
