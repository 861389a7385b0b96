"""The promises of ARCHITECTURE.md about the tree, checked on the tree."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LAYERS = {  # a folder, and those that it may include from
    "base": {"base"},
    "driver": {"base", "driver", "kernels"},
    "alloc": {"base", "driver", "alloc"},
    "scaler": {"base", "driver", "scaler", "kernels"},
    "optim": {"base", "driver", "optim", "kernels"},
    "loss": {"base", "driver", "loss", "kernels"},
    "checkpoint": {"base", "driver", "checkpoint"},
    "transfer": {"base", "driver", "transfer"},
    "data": {"base", "driver", "data", "kernels"},
    "confine": {"base", "confine"},
    "python": {
        "base",
        "driver",
        "alloc",
        "scaler",
        "optim",
        "loss",
        "checkpoint",
        "transfer",
        "data",
        "confine",
        "python",
        "kernels",
    },
    "simcuda": {"simcuda", "driver/cuda_types.h", "kernels"},
}
PRIVATE = re.compile(
    r"\bmemopt(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*|\bfrom memopt[\w.]* import (?:\([^)]*?|[^(\n]*?)\b_(?!_)\w+"
)
SOURCES = [path for layer in LAYERS for path in sorted((CSRC / layer).glob("*.[ch]"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_includes_go_downwards(source):
    allowed = LAYERS[source.parent.name]
    for written in re.findall(r'#include "([^"]+)"', source.read_text()):
        included = written.removeprefix("csrc/").removeprefix("../")
        folder = included.split("/")[0] if "/" in included else source.parent.name
        assert folder in allowed or included in allowed, included


def test_only_the_python_layer_knows_python():
    knowing = {source.parent.name for source in SOURCES if "<Python.h>" in source.read_text()}
    assert knowing == {"python"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from memopt._demo.tasks import Task", ["memopt._demo.tasks"]),
        ("from memopt import _C, chain", ["from memopt import _C"]),
        (
            "from memopt.cuda import (\n    trim,\n    _pool,\n)",
            ["from memopt.cuda import (\n    trim,\n    _pool"],
        ),
        ("memopt.cuda._pool.open()", ["memopt.cuda._pool.open"]),
        ("memopt.__version__, memopt.live_tensors(), from memopt.demo import get_task", []),
    ],
)
def test_private_names_are_found(text, found):
    assert PRIVATE.findall(text) == found


def test_benchmarks_notebooks_and_readme_use_public_names():
    listed = ["git", "ls-files", "benchmarks/*.py", "notebooks/*.ipynb", "README.md"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    private = {file: names for file in files if (names := PRIVATE.findall((ROOT / file).read_text()))}
    # The child process of `memopt estimate`: no option of the command has it compute the script for real.
    # The training loops of `memopt gpu-check`, which are in the wheel. The update, which is given a price. What the
    # CPU's allocator counts, as memopt.fit()'s budget has it, and the demo's models. A script by its plan on a card
    # that computes nothing: `memopt run --sim` computes.
    assert private == {
        "benchmarks/bench_fit_scripts.py": [
            "memopt._run",
            "memopt._estimate",
            "memopt._estimate.cards",
            "memopt._estimate.host_reads",
            "memopt._estimate.roofline_clock",
            "memopt._run.peaks",
            "memopt._run.techniques",
            "memopt._runtime",
        ],
        "benchmarks/bench_estimate.py": ["memopt._estimate.script_process"],
        "benchmarks/workloads.py": ["memopt._gpu_check.workloads"],
        "benchmarks/bench_fit.py": ["memopt._checkpoint.stages.costs", "memopt._demo.tasks"],
        "benchmarks/bench_step_overlap.py": ["memopt.optim._one_pass"],
    }
