"""double_map: memory at two addresses, decided by a test of each device when its pool opens, unless the user says."""

import pytest

SIM = None
pytestmark = pytest.mark.sampled(4)

START = """
import warnings
import memopt.sim
memopt.sim.activate(memory="256MiB", {device})
import torch, memopt
MIB = 1 << 20
seen = []
warnings.showwarning = lambda message, category, filename, line, *rest: seen.append((category, str(message), filename))
warnings.simplefilter("always")
def topics():
    return [f for f in memopt.doctor().findings if f.topic == "double_map"]
def block(device=0):
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=f"cuda:{{device}}")
    for _ in range(3): pass  # what is pending is done between two lines
    return x
"""


def run(run_script, source: str, device: str = "") -> None:
    done = run_script(START.format(device=device) + source)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_coherent_device_has_it_on_after_one_test_and_no_warning(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
assert topics() == [] and memopt.sim.calls("cuGraphLaunch") == 0  # nothing happens before the first use
live = [block() for _ in range(3)]
assert memopt._C.allocator_double_map(0) == (True, True, "")
assert memopt.sim.calls("cuGraphLaunch") == 1
(found,) = topics()
assert found.state == "ok" and found.text == "on for device 0: it passed the test of aliased memory"
assert "double_map=False" in found.mend and "persistent" in found.mend and "griddepcontrol.wait" in found.mend
assert seen == []
assert memopt.sim.stats()["graphs"] == 0
""",
    )


def test_a_device_with_stale_aliases_has_it_off_with_one_warning_and_a_line_of_the_doctor(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
live = [block() for _ in range(3)]
on, tested, why = memopt._C.allocator_double_map(0)
assert not on and tested and "did not read by the other" in why
(warning,) = seen
assert warning[0] is RuntimeWarning and "double_map is off on device 0" in warning[1] and why in warning[1]
assert warning[2].endswith("script.py")
(found,) = topics()
assert found.state == "absent" and why in found.text and "double_map=False" in found.mend
assert "off for device 0" in str(memopt.doctor()) and memopt.doctor().healthy
live.append(block(1))
assert len(seen) == 2 and "device 1" in seen[1][1] and len(topics()) == 2
""",
        "devices=2, stale_aliases=True",
    )


@pytest.mark.parametrize("stale", [True, False])
def test_while_it_is_off_no_memory_has_two_addresses_and_every_byte_is_kept(stale, run_script):
    run(
        run_script,
        f"""
import random
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(memory_budget="28MiB"))
numbers, live, most = random.Random(1), [], 0
for step in range(150):
    size = numbers.randrange(1, 5 * MIB)
    while live and sum(len(x) for x, _ in live) + size > 16 * MIB:
        x, value = live.pop(numbers.randrange(len(live)))
        assert all(x[i].item() == value for i in (0, len(x) // 2, -1))
        del x
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    live.append((x, step % 251))
    x.copy_(torch.full((size,), step % 251, dtype=torch.uint8))
    most = max(most, memopt.sim.stats()["mappings"] - memopt.sim.stats()["handles"])
assert memopt.cuda.memory_stats(0)["granules_moved"] > 0
assert (most > 0) == {not stale}, most
""",
        f"stale_aliases={stale}",
    )


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("stale", [True, False])
def test_what_the_user_says_is_not_tested(wanted, stale, run_script):
    run(
        run_script,
        f"""
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(double_map={wanted}))
live = [block() for _ in range(3)]
assert memopt._C.allocator_double_map(0) == ({wanted}, False, "")
assert memopt.sim.calls("cuGraphLaunch") == memopt.sim.calls("cuLaunchKernel") == 0
(found,) = topics()
assert found.state == "ok" and found.text.startswith("{"on" if wanted else "off"} for device 0")
assert ("double_map=False" in found.mend) == {wanted} and seen == []
""",
        f"stale_aliases={stale}",
    )


def test_where_the_kernels_cannot_be_loaded_it_is_off_and_the_reason_is_told(run_script):
    run(
        run_script,
        """
memopt.sim.fail("cuModuleLoadDataEx", count=1000, code=209)
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
live = [block() for _ in range(3)]
memopt.sim.fail_clear()
on, tested, why = memopt._C.allocator_double_map(0)
assert not on and tested and "memopt's CUDA kernels cannot be loaded" in why
assert len(seen) == 1 and why in seen[0][1]
(found,) = topics()
assert found.state == "absent" and why in found.text
""",
    )


def test_a_warning_that_is_an_error_is_raised_and_the_allocation_stays(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
warnings.simplefilter("error")
try:
    live = block()
    live = None
except RuntimeWarning as error:
    assert "double_map is off" in str(error)
else:
    raise AssertionError("no warning")
assert block().numel() == 3 * MIB
""",
        "stale_aliases=True",
    )


def test_a_blank_device_keeps_nothing_to_be_tested_and_has_it_on(run_script):
    run(
        run_script,
        """
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
live = block()
assert memopt._C.allocator_double_map(0) == (True, False, "") and seen == []
""",
        "blank=True",
    )


def test_a_pool_that_opens_while_a_stream_is_captured_is_tested_and_the_capture_goes_on(run_script):
    run(
        run_script,
        """
import ctypes
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
torch.cuda.init()
torch.cuda.current_stream()
driver = ctypes.CDLL(str(memopt.sim.libraries() / "sim_cuda.so"))
stream, graph = torch.cuda.Stream(), ctypes.c_void_p()
handle = ctypes.c_void_p(stream.cuda_stream)
assert memopt._C.allocator_double_map(0) is None
assert driver.cuStreamBeginCapture_v2(handle, 0) == 0  # global mode, by somebody else than torch
with torch.cuda.stream(stream):
    x = block()
assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0 and graph.value
assert memopt._C.allocator_double_map(0) == (True, True, "") and seen == []
assert driver.cuGraphDestroy(graph) == 0
""",
    )


def test_gpu_check_calls_stale_aliases_wrong(run_script):
    run(
        run_script,
        """
from memopt._gpu_check import parts
found = parts.aliasing(parts.PartRequest("aliasing", True, True))
assert found.status == "wrong" and "did not read by the other" in found.text, found
""",
        "stale_aliases=True",
    )
