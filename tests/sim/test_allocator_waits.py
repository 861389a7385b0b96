"""The host waits for nothing that torch's own allocator would not wait for: no capture, and no time limit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

SIM = None  # each process of these tests activates its own
SEED = int(os.environ.get("MEMOPT_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
ROUNDS = 100 if os.environ.get("MEMOPT_SOAK") == "1" else 3

STRESS = """
import runpy, sys
sys.argv = ["capture_stress.py", {which!r}, "{seed}", "{rounds}"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def stress(run_script):
    def run(which: str) -> dict:
        script = str(Path(__file__).with_name("capture_stress.py"))
        done = run_script(STRESS.format(which=which, seed=SEED, rounds=ROUNDS, script=script))
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{which}: longest {max(found['longest'].values()):.3f} s of", found["longest"])
        return found

    return run


def test_threads_beside_captures_get_what_there_is_or_an_error_and_none_waits(stress):
    """On an eager device all work but a capture's is over at once: whoever waits would wait for a capture."""
    print(f"MEMOPT_SEED={SEED}")
    native, ours = stress("native"), stress("memopt")
    assert ours["graphs"] == native["graphs"] == ROUNDS
    assert ours["host_waits"] == 0
    for found in (native, ours):
        assert {error.partition(": ")[2] for error in found["errors"]} == {"OutOfMemoryError"}
        assert found["errors"]["request that is refused: OutOfMemoryError"] == found["turns"]["ask"]
