"""The device's bar by NVML's maintained binding, which here speaks with the simulated device's NVML library."""

from __future__ import annotations

import json

from environment_python import run_there

MIB = 1 << 20

BAR = """
import json, os
import memopt.sim
memopt.sim.activate(memory="256MiB", context="8MiB", devices=2)
import pynvml, torch
import memopt

held = torch.ones(3 << 18, device="cuda:1")
bars = [memopt.device_bar(device) for device in range(2)]
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(1)
print(json.dumps({
    "bars": [[bar.parts, bar.total, bar.source] for bar in bars],
    "processes": {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)},
    "own": os.getpid(),
    "reserved": torch.cuda.memory_reserved(1),
}))
"""


def test_the_real_binding_is_asked_and_its_number_of_this_process_is_taken():
    told = json.loads(run_there("extras", BAR))
    for parts, total, source in told["bars"]:
        assert source == "NVML and the driver" and sum(parts.values()) == total == 256 * MIB
        assert parts["context"] == 8 * MIB and "context and other processes" not in parts
    parts = told["bars"][1][0]
    assert parts["inputs"] == 3 * MIB and parts["inputs"] + parts["cache"] == told["reserved"]
    assert told["processes"] == {str(told["own"]): told["reserved"] + 8 * MIB}
