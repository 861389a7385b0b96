"""The recorder is there before the device is: it neither needs nor begins it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIM = None
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import memopt.sim; memopt.sim.activate(memory="256MiB")
import torch
from memopt._memory.recording import recorder
recording = recorder.start()
assert not torch.cuda.is_initialized()
assert recording.recording().blocks == 0 and recording.devices() == [] and not torch.cuda.is_initialized()
x = torch.ones(1000, device="cuda")
seen = recording.recording()
assert seen.columns["size"].tolist() == [x.nbytes] and seen.columns["born"].tolist() == [0], seen.columns
recording.stop()
later = torch.ones(1000, device="cuda")
assert torch.cuda.memory._snapshot()["device_traces"][0] == []
print("as it should be")
"""


def test_recording_begins_before_the_device_is_in_use_and_does_not_begin_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "as it should be"), done.stderr
