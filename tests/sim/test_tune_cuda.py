"""memopt.data.tune where there is a device: its trials of pin_memory, which are forks."""

from __future__ import annotations

SIM = {"memory": "256MiB"}

SCRIPT = """
import memopt
memopt.sim.activate(memory="256MiB")
import torch
from torch.utils.data import DataLoader, TensorDataset

def tuned():
    loader = DataLoader(TensorDataset(torch.arange(400.0)), batch_size=8)
    found = memopt.data.tune(loader, memory_budget="2GiB", seconds=100, batches=20, startup=600, workers=[0])
    return found, [trial for trial in found.trials if trial.note == "copied to cuda"]

# Trials leave the process fit for more of them.
for _ in range(2):
    found, pinned = tuned()
    assert [trial.settings.pin_memory for trial in pinned] == [False, True]
    assert all(trial.complete and trial.batches == 20 for trial in pinned), found
    assert not any("pin_memory" in note for note in found.notes)
assert torch.cuda.is_available()
# Now no fork can use the device, and none is sent to fail.
found, pinned = tuned()
assert not pinned and any("torch.cuda.is_available()" in note for note in found.notes)
"""


def test_pinned_memory_is_tried_until_the_devices_were_counted(run_script):
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr
