"""The package's surface: the names, the stub, what is loaded when, and what is said where something is missing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import memopt
from memopt import _C

ROOT = Path(__file__).resolve().parents[2]


def test_the_stub_names_exactly_what_the_extension_has():
    stub = ast.parse((ROOT / "memopt/_C.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    real = {name for name in dir(_C) if not name.startswith("_")} | {"__version__"}
    assert {name for name in named if not name.startswith("_") or name.startswith("__")} == real


def test_the_stubs_parameters_are_those_of_the_signatures():
    stub = ast.parse((ROOT / "memopt/_C.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            there = inspect.signature(getattr(_C, node.name))
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert names == list(there.parameters), node.name


def test_every_function_of_the_extension_documents_itself():
    for name, value in vars(_C).items():
        if callable(value) and not name.startswith("_"):
            assert value.__doc__, name


def test_public_names_are_there_and_listed():
    for name in memopt.__all__:
        assert getattr(memopt, name) is not None and name in dir(memopt)
    with pytest.raises(AttributeError, match="no attribute 'docter'"):
        _ = memopt.docter


MODULES = [memopt, *(value for name in memopt.__all__ if inspect.ismodule(value := getattr(memopt, name)))]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_only_public_names_are_listed(module):
    assert {name for name in dir(module) if name[:2] != "__"} == set(module.__all__) - {"__version__"}


def test_importing_loads_neither_torch_nor_numpy_nor_ctypes():
    code = "import memopt, sys; print(*sorted({'torch', 'numpy', 'ctypes', 'argparse'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_the_allocator_without_a_gpu_says_what_is_missing_and_changes_nothing():
    import torch

    before = torch.cuda.memory.get_allocator_backend() if torch.version.cuda else None
    with pytest.raises(memopt.Error) as caught:
        memopt.cuda.allocator()
    assert caught.value.status in ("MO_NO_LIBRARY", "MO_NO_DEVICE")
    assert "driver" in str(caught.value) or "device" in str(caught.value)
    assert before == (torch.cuda.memory.get_allocator_backend() if torch.version.cuda else None)


def test_statistics_of_an_unused_allocator_are_zero():
    for device in (None, 0, 3, "cuda:1"):
        assert set(memopt.cuda.memory_stats(device).values()) == {0}


@pytest.mark.parametrize("device", [-1, 999, "cpu", "cuda:99"])
def test_statistics_of_what_is_no_cuda_device_are_refused_by_name(device):
    with pytest.raises(ValueError, match=str(device).removeprefix("cuda:")):
        memopt.cuda.memory_stats(device)


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 GB", 1_500_000_000),
        ("80G", 80 << 30),
        (" 512 mib ", 512 << 20),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_read(size, bytes_):
    assert _C.parse_size(size) == bytes_


@pytest.mark.parametrize(
    "size",
    [
        -1,
        2**63,
        -(2**80),
        "",
        "lots",
        "-8GiB",
        "8 apples",
        "1.5",
        "8Gi",
        "9EiB",
        "1e9",
        "8GiB\0",
        "٨GiB",
        "8 G i B",
    ],
)
def test_nonsense_negatives_and_overflow_are_value_errors_that_name_the_input(size):
    with pytest.raises(ValueError) as caught:
        _C.parse_size(size)
    shown = str(size).split("\0")[0]
    assert shown in str(caught.value)


@pytest.mark.parametrize("size", [1.5, None, True, b"8GiB", [8]])
def test_other_types_are_type_errors_that_name_the_input(size):
    with pytest.raises(TypeError) as caught:
        _C.parse_size(size)
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (79 << 30, "79.0 GiB"),
        (2**64 - 1, "16.0 EiB"),
        ((1 << 20) - 1, "1.00 MiB"),
    ],
)
def test_sizes_are_shown(bytes_, text):
    assert _C.format_size(bytes_) == text
