"""The programs of the documentation's pages run, on a simulated card that computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environment_python import python_of

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
    "leaks": r"held by `losses\[\*\]`",
    "lightning": r"stages within 56\.0 MiB[^$]*max_steps=3` reached",
    "long_batches": r"8192 samples ran out of memory; its step was done again in micro-batches of \d+",
    "notebooks": r"(\d\.\d{4}\n){3}",
    "several_gpus": r"stages within 80\.0 MiB",
}


def program(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", [page for page in PAGES if program(page)], ids=lambda page: page.stem)
def test_the_program_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in LIBRARIES and os.environ.get("MEMOPT_SOAK") != "1":
        pytest.skip("the long form")
    python = python_of("libraries") if page.stem in LIBRARIES else sys.executable
    (tmp_path / "page.py").write_text(program(page))
    run = ["-m", "memopt", "run", "--no-record", "--sim", CARDS.get(page.stem, "4GiB")]
    done = subprocess.run(
        [python, *run, "page.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # a hang
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SAID[page.stem], done.stdout + done.stderr), done.stdout + done.stderr
