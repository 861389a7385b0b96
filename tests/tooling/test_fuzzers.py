"""Each fuzzer of tests/fuzz for a short while under AddressSanitizer, with the random inputs of random_input.h: with a
fixed seed, so that a commit is judged the same everywhere, and with this session's. `make fuzz` is the long form, with
libFuzzer; MEMOPT_SOAK=1 lengthens this one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from c_tests import make

ROOT = Path(__file__).resolve().parents[2]
FUZZERS = sorted(path.stem for path in (ROOT / "tests" / "fuzz").glob("fuzz_*.c"))


@pytest.fixture(scope="module")
def built() -> dict[str, str | None]:
    """The output of make for each fuzzer that it could not build, None for the others."""
    return {name: make(f"build/c/asan/fuzz/{name}") for name in FUZZERS}


@pytest.mark.parametrize("seed", ["fixed", "fresh"])
@pytest.mark.parametrize("name", FUZZERS)
def test_no_input_breaks_it(name: str, seed: str, built: dict[str, str | None]) -> None:
    if built[name]:
        pytest.fail(built[name], pytrace=False)
    number = "1" if seed == "fixed" else os.environ["MEMOPT_SEED"]
    done = subprocess.run(
        [f"build/c/asan/fuzz/{name}"],
        cwd=ROOT,
        env={**os.environ, "MEMOPT_SEED": number},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=3600,
    )
    assert done.returncode == 0, f"{name}, MEMOPT_SEED={number}:\n{done.stdout}{done.stderr}"
    inputs = re.search(r"# (\d+) inputs", done.stdout)
    assert inputs and int(inputs[1]) >= 1000


def test_there_are_fuzzers() -> None:
    assert FUZZERS
