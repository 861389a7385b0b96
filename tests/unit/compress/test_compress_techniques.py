"""memopt.compress with the libraries that do the work: compress_with_libraries.py, in their environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment_python import run_there

RUN = "import os, sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
TESTS = Path(__file__).resolve().parents[2] / "helpers" / "compress_with_libraries.py"


@pytest.mark.sampled("other libraries")
def test_with_torchao_and_torch_pruning():
    """Without conftest.py, which is for the environment that this runs in."""
    said = run_there("techniques", RUN, str(TESTS), "-q", "--noconftest", "-p", "no:cacheprovider")
    assert " passed" in said and "skipped" not in said, said
