"""Families of tests of which a run has some (helpers/sampling.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sampling

TESTS = Path(__file__).resolve().parents[1]
SOURCE = """
import pytest
@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", range(20))
def test_of_a_family(n): pass
def test_alone(): pass
@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", range(20))
def test_one_of_a_family(n): pass
"""
# Of a family that several files have.
ANOTHER = """
import pytest
@pytest.mark.sampled("forged files")
@pytest.mark.parametrize("n", range(20))
def test_of_a_named_family(n): pass
"""
CONFTEST = """
import sampling
def pytest_collection_modifyitems(config, items): sampling.sample(config, items)
def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(sampling.summary(config.stash[sampling.LEFT]))
"""


@pytest.fixture
def collected(tmp_path):
    """A function from a seed to the tests that a run with it has, and its output."""
    (tmp_path / "test_it.py").write_text(SOURCE)
    for number in range(2):
        (tmp_path / f"test_named_{number}.py").write_text(ANOTHER)
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def collect(seed: str, *names: str) -> tuple[list[str], str]:
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *names]
        environment = {**os.environ, "MEMOPT_SEED": seed, "PYTHONPATH": str(TESTS / "helpers")}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return re.findall(r"^test_(?:it|named_.)\.py::(\S+)$", done.stdout, re.M), done.stdout

    return collect


def test_of_a_family_the_first_is_run_and_others_by_the_seed(collected):
    some, said = collected("1", "test_it.py")
    assert some[0] == "test_of_a_family[0]" and some[4] == "test_alone" and len(some) == 6
    assert "left to `make soak`: 35 tests: test_it.py::test_of_a_family 16 of 20" in said
    assert len({collected(str(seed), "test_it.py")[0][5] for seed in range(4)}) > 1
    assert collected("1", "test_it.py")[0] == some != collected("2", "test_it.py")[0]


def test_of_a_family_of_several_files_any_may_be_run(collected):
    files = "test_named_0.py", "test_named_1.py"
    drawn = [collected(str(seed), *files) for seed in range(4)]
    assert all(len(some) == sampling.FAMILIES["forged files"] for some, _ in drawn)
    assert "forged files 38 of 40" in drawn[0][1]
    assert len({name for some, _ in drawn for name in some}) > 4


def test_one_that_is_named_is_run(collected):
    assert collected("1", "test_it.py::test_of_a_family[17]")[0] == ["test_of_a_family[17]"]
