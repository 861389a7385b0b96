"""The programs of the documentation's pages run, on a simulated card that computes; so does a trainer with the changes
that the page on nanoGPT shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from environment_python import python_of

from memopt import _C

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs/how_to").glob("*.md")),
    ROOT / "docs/reference/errors.md",
    ROOT / "docs/reference/files.md",
]
LIBRARIES = {"hugging_face_trainer", "lightning"}  # of others, which the environment of that name has
CARDS = {"long_batches": "760MiB"}  # on which the long batch does not fit
SAID = {  # by each, a regular expression
    "batch_size": r"\n4096\n",
    "ci_gate": "ended with 0",
    "choose_a_card": r"fits \(\d+, \d+\)",
    "errors": r"stages within \d",
    "files": r"memopt recording 1 \d+ blocks",
    "fragmentation": "CUDA memory summary",
    "hugging_face_trainer": r"stages within 48\.0 MiB[^$]*4[0-8] MiB at the peak",
    "host_memory": r"more private memory than at the first batch",
    "large_models": r"it fits with \d+ MiB, bit-equal[^$]*(\d\.\d{4}\n){3}",
    "leaks": r"held by `losses\[\*\]`",
    "lightning": r"stages within 56\.0 MiB[^$]*max_steps=3` reached",
    "long_batches": r"8192 samples ran out of memory; its step was done again in micro-batches of \d+",
    "notebooks": r"(\d\.\d{4}\n){3}",
    "several_gpus": r"stages within 80\.0 MiB",
}


def run(
    folder: Path, text: str, *options: str, python: str = sys.executable, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program by `memopt run`, without anything of this user's."""
    (folder / "page.py").write_text(text)
    done = subprocess.run(
        [python, "-m", "memopt", "run", *options, "page.py", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # a hang
    )
    assert done.returncode == 0, done.stderr
    return done


def program(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.sampled("programs of the documentation")
@pytest.mark.parametrize("page", [page for page in PAGES if program(page)], ids=lambda page: page.stem)
def test_the_program_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in LIBRARIES and os.environ.get("MEMOPT_SOAK") != "1":
        pytest.skip("the long form")
    python = python_of("libraries") if page.stem in LIBRARIES else sys.executable
    done = run(tmp_path, program(page), "--no-record", "--sim", CARDS.get(page.stem, "4GiB"), python=python)
    assert re.search(SAID[page.stem], done.stdout + done.stderr), done.stdout + done.stderr


# ---- nanoGPT ---------------------------------------------------------------------------------------------------------


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
    done = run(folder, script, "--sim", "2GiB", arguments=SMALL)
    peak = re.search(r"peak ([\d.]+ \w+)", done.stderr)
    assert peak, done.stderr
    return float(re.findall(r": loss ([\d.]+)", done.stdout)[-1]), _C.parse_size(peak[1].replace(" ", ""))


@pytest.mark.sampled("programs of the documentation")
def test_a_trainer_like_nanogpt_trains_alike_in_less_memory(tmp_path: Path) -> None:
    page = (ROOT / "docs/how_to/nanogpt.md").read_text()
    plain = (ROOT / "benchmarks/scripts/nanogpt.py").read_text()
    after = changed(plain, page.split("```diff\n")[1].split("\n```")[0])
    loss, peak = trained(tmp_path, plain)
    loss_after, peak_after = trained(tmp_path, after.replace("8GiB", "44MiB"))
    assert abs(loss_after - loss) < 0.02 * loss
    assert peak_after < 0.8 * peak
