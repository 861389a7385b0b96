"""The build where something that it needs is not there: a line that names it and its package, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ["setup.py", "--quiet", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]


@pytest.fixture
def build(tmp_path: Path):
    """Builds the extension, or would, in a folder of its own; returns the status and the lines of standard error."""

    def run(*, python: str = "", **environment: str) -> tuple[int, list[str]]:
        arguments = [str(tmp_path / word) if word in ("lib", "temp") else word for word in BUILD]
        code = f"import runpy, sys, sysconfig; sys.argv = {arguments!r}; {python or 'pass'}; "
        code += "runpy.run_path('setup.py', run_name='__main__')"
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert not (tmp_path / "lib").exists()
        return done.returncode, done.stderr.splitlines()

    return run


def compiler(folder: Path, refused: str) -> str:
    """A C compiler that does not find a header."""
    script = folder / "cc"
    script.write_text(f"#!/bin/sh\n! grep -q {refused}\n")
    script.chmod(0o755)
    return str(script)


def test_without_a_c_compiler_there_is_one_line_with_its_package(build) -> None:
    status, lines = build(CC="/nowhere/gcc -m64")
    assert status == 1 and len(lines) == 1, lines
    assert "/nowhere/gcc" in lines[0] and "gcc libc6-dev" in lines[0] and "dnf install gcc" in lines[0]


def test_without_the_c_librarys_headers_there_is_one_line_with_their_package(build, tmp_path: Path) -> None:
    status, lines = build(CC=compiler(tmp_path, "stdio.h"))
    assert status == 1 and len(lines) == 1 and "libc6-dev" in lines[0], lines


def test_without_pythons_header_there_is_one_line_with_its_package(build, tmp_path: Path) -> None:
    status, lines = build(CC=compiler(tmp_path, "Python.h"))
    assert status == 1 and len(lines) == 1, lines
    assert "Python.h" in lines[0] and "python3-dev;" in lines[0] and "python3-devel" in lines[0]


def test_a_free_threaded_python_is_refused_in_one_line(build) -> None:
    there = "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
    status, lines = build(python=there)
    assert status == 1 and len(lines) == 1 and "free-threaded" in lines[0], lines


def test_an_nvcc_that_is_demanded_and_missing_is_one_line(build) -> None:
    status, lines = build(MEMOPT_CUDA="1", MEMOPT_NVCC="/nowhere/nvcc")
    assert status == 1 and len(lines) == 1 and "/nowhere/nvcc" in lines[0], lines
