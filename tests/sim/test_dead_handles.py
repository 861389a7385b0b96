"""Streams of the program's own under memopt's allocator, on a device that ends the process where a call is given the
handle of a destroyed stream, as a GPU's driver may."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

SIM = None

START = """
import ctypes, gc
import memopt.sim
memopt.sim.activate(memory="64MiB", dead_handles=True)
import torch, memopt

MIB = 1 << 20
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(double_map={double_map}))
torch.cuda.init()
torch.cuda.current_stream()
driver = ctypes.CDLL(str(memopt.sim.libraries() / "sim_cuda.so"))
memopt.sim.lazy(True)

def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

class Borrowed:  # a stream as cupy or numba make one, and end it
    def __enter__(self):
        self.handle = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(self.handle), 1) == 0
        self.stream = torch.cuda.ExternalStream(self.handle.value)
        self.scope = torch.cuda.stream(self.stream)
        self.scope.__enter__()
        return self
    def __exit__(self, *error):
        self.scope.__exit__(*error)
    def destroy(self):
        assert driver.cuStreamDestroy_v2(self.handle) == 0

def used_by(it, mib):
    x = block(mib)
    x.fill_(1)  # work that pends
    return x
"""

USES = {
    "its tensors freed before its end": """
with Borrowed() as it:
    x = used_by(it, 48)
    del x
it.destroy()
""",
    "its tensors freed after its end, as torch allows": """
with Borrowed() as it:
    x = used_by(it, 48)
it.destroy()
del x
""",
    "recorded on it, freed before its end": """
x = block(48)
with Borrowed() as it:
    x.fill_(1)
    x.record_stream(it.stream)
del x
it.destroy()
""",
    "several, one after the other": """
for i in range(70):
    with Borrowed() as it:
        x = used_by(it, 20)
        y = block(3)
        y.record_stream(torch.cuda.current_stream())
        del x
        z = used_by(it, 21)
    it.destroy()
    del y, z
""",
}


@pytest.fixture
def survives(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[str, bool], None]:
    def run(body: str, double_map: bool) -> None:
        done = run_script(START.format(double_map=double_map) + body + "\nprint('survived')\n")
        assert done.returncode == 0 and "survived" in done.stdout, done.stdout + done.stderr

    return run


PRESSURE = """
a = block(8)
b = block(50)  # needs what the destroyed stream had
del a, b
c = block(60)
del c
torch.cuda.empty_cache()
memopt.cuda.fragmentation()
"""


@pytest.mark.parametrize("double_map", [True, False], ids=["two addresses", "one address"])
def test_memory_of_a_destroyed_stream_serves_another_and_its_handle_is_not_used(double_map, survives):
    survives("".join(f"print({use!r}, flush=True)\n{USES[use]}{PRESSURE}" for use in USES), double_map)


def test_a_graph_captured_on_such_a_stream_outlives_it(survives):
    survives(
        """
static = block(8)
graph = torch.cuda.CUDAGraph()
with Borrowed() as it:
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=it.stream):
        y = used_by(it, 8) + 1
it.destroy()
graph.replay()
b = block(36)
del b, graph, y, static
c = block(60)
""",
        False,
    )


@pytest.mark.parametrize("double_map", [True, False], ids=["two addresses", "one address"])
def test_streams_of_torchs_pools_are_waited_for_on_the_device(double_map, survives):
    """And at no cost: no event but the one that the other stream needs."""
    survives(
        """
side = torch.cuda.Stream()
for i in range(5):
    with torch.cuda.stream(side):
        x = used_by(side, 12)
        del x
assert memopt.sim.calls("cuEventRecord") == 0
with torch.cuda.stream(side):
    x = used_by(side, 48)
    del x
waits = memopt.sim.calls("cuCtxSynchronize")
x = block(60)
assert memopt.sim.calls("cuEventRecord") > 0
assert memopt.sim.calls("cuCtxSynchronize") == waits
""",
        double_map,
    )


def test_a_dead_event_is_named(run_script):
    done = run_script(
        START.format(double_map=True)
        + """
event = ctypes.c_void_p()
assert driver.cuEventCreate(ctypes.byref(event), 0) == 0
assert driver.cuEventDestroy_v2(event) == 0
driver.cuEventQuery(event)
"""
    )
    assert done.returncode == -6 and "cuEventQuery was given 0x" in done.stderr, done.stderr
