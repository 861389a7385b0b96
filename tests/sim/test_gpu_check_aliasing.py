"""The part `aliasing` of `memopt gpu-check`: each fault that is planted in memory at two addresses is reported."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from memopt._gpu_check import aliasing_part

SIM = None

ALIASING = """
import memopt.sim
memopt.sim.activate(memory="1GiB", devices=2, compute_capability="9.0", stale_aliases={stale})
import torch
from memopt._gpu_check import aliasing_part, parts
def reported():
    return parts.aliasing(parts.PartRequest("aliasing", True, True))
"""


@pytest.mark.sampled("faults that gpu-check finds")
def test_stale_reads_by_a_second_address_are_wrong(run_script):
    done = run_script(
        ALIASING.format(stale=True)
        + """
found = reported()
assert found.status == "wrong" and found.text.startswith("device 0: off: "), found
assert "dependent launch, device 1: 100 of 100 reads behind griddepcontrol.wait had an old value" in found.text, found
assert "device 0's memory by its second address, read by device 1: 200 of 200 reads had an old" in found.text, found
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("faults that gpu-check finds")
def test_a_peer_that_reads_old_values_is_wrong(run_script):
    done = run_script(
        ALIASING.format(stale=False)
        + """
copied, rounds = aliasing_part._copied, iter(range(200))
aliasing_part._copied = lambda *given: None if next(rounds) == 50 else copied(*given)
found = reported()
assert found.status == "wrong" and found.text.endswith("read by device 1: 1 of 200 reads had an old value"), found
memopt.sim.fail("cuMemcpyDtoDAsync_v2", count=1)
found = reported()
assert found.status == "wrong" and found.text.startswith("peers: RuntimeError: cuMemcpyDtoDAsync_v2: CUDA_ERR"), found
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("faults that gpu-check finds")
def test_old_values_are_a_figure_before_the_wait_of_a_dependent_launch_and_wrong_behind_it(run_script):
    done = run_script(
        ALIASING.format(stale=False)
        + """
import ctypes
read, found_by_it = aliasing_part._dependently_read, {}
def resident(arguments, grid, block):
    read(arguments, grid, block)
    results = aliasing_part._word(arguments[2])
    for word, value in found_by_it.items():
        ctypes.c_uint.from_address(results + 4 * word).value = value
aliasing_part._dependently_read = resident
found_by_it.update({0: 1, 1: 0})  # it was there at the write, and read what was there before
found = reported()
name = "dependent launch, device 0"
assert found.status == "ok", found
assert found.figures[f"{name}, reader resident at the write"] == "100 of 100"
assert found.figures[f"{name}, then new values before griddepcontrol.wait (not promised)"] == 0
found_by_it.update({2: 7})
found = reported()
assert found.status == "wrong" and "99 of 100 reads behind griddepcontrol.wait" in found.text, found
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("faults that gpu-check finds")
def test_without_a_peer_and_dependent_launches_both_are_not_here(run_script):
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt._gpu_check import parts
found = parts.aliasing(parts.PartRequest("aliasing", True, True))
assert found.status == "ok" and found.figures["peers"] == "not here: one GPU", found
assert found.figures["dependent launch, device 0"] == "not here: compute capability below 9.0"
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "ptx", [aliasing_part.COPY_PTX, aliasing_part.DEPENDENT_PTX], ids=["copy", "dependent"]
)
def test_ptxas_assembles_the_kernels_of_aliased_memory(ptx, tmp_path):
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas on the PATH: the PTX of gpu-check's aliasing part is not assembled")
    (tmp_path / "kernels.ptx").write_bytes(ptx)
    line = [ptxas, "-arch=sm_90", str(tmp_path / "kernels.ptx"), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
