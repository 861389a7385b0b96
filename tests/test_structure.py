"""What ARCHITECTURE.md promises of the tree, checked on the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize(
    "layer", ["base", "driver", "alloc", "scaler", "optim", "checkpoint", "transfer", "data", "confine"]
)
def test_every_module_has_a_c_test_of_the_same_name(layer):
    missing = [
        name(source)
        for source in sorted((CSRC / layer).glob("*.c"))
        if not (ROOT / f"tests/c/test_{source.stem}.c").exists()
    ]
    assert missing == []


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


def test_no_file_is_longer_than_six_hundred_lines():
    files = [*SOURCES, *(ROOT / "memopt").rglob("*.py"), *(ROOT / "kernels").glob("*.cu*")]
    assert [name(path) for path in files if len(path.read_text().splitlines()) > 600] == []


def test_each_condition_of_the_pools_check_has_a_planted_fault():
    checked = (CSRC / "alloc/pool_report.c").read_text().partition("#define EXPECT")[2]
    conditions = re.findall(r"^\s+EXPECT\((.+?)\);", checked, re.M | re.S)
    planted = re.sub(r'"\s*"', "", (ROOT / "tests/c/test_pool_report.c").read_text())
    assert len(conditions) > 30
    missing = [text for text in conditions if f'"{" ".join(text.split())}"' not in planted]
    assert missing == []
