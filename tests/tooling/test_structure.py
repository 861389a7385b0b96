"""What ARCHITECTURE.md promises of the tree, checked on the tree."""

from __future__ import annotations

import re
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
        "checkpoint",
        "transfer",
        "data",
        "confine",
        "python",
        "kernels",
    },
    "simcuda": {"simcuda", "driver/cuda_types.h", "kernels"},
}
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
