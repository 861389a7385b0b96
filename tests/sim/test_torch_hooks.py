"""memopt's hooks under real torch: an allocation that fails leaves memopt_malloc as torch's own exception, thrown from
C, and a free that fails is counted. (Without torch: tests/c/test_torch_hooks.c, tests/c/test_torch_throw.c.)"""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch

import memopt
from memopt import _C, sim

SIM = {"memory": "256MiB"}
MIB = 1 << 20
ILLEGAL_ADDRESS = 700

# As a user would, before the first allocation of the process.
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def live() -> tuple[int, int]:
    return sim.stats()["allocations"], memopt.cuda.memory_stats()["live_blocks"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    gc.collect()
    before = live()
    yield
    gc.collect()
    assert live() == before


def test_a_request_beyond_the_device_is_torchs_out_of_memory_error():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        block(1 << 30)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 1.00 GiB on GPU 0.")
    assert "256 MiB in all, of which 256 MiB are free" in text
    assert isinstance(caught.value, RuntimeError) and torch.cuda.OutOfMemoryError is torch.OutOfMemoryError


def test_the_text_tells_what_memopt_holds():
    held = [block(10 * MIB) for _ in range(3)]
    with pytest.raises(
        torch.OutOfMemoryError, match="memopt's pass-through allocator holds 30.0 MiB in 3 blocks"
    ):
        block(1 << 30)
    del held


def test_a_device_is_filled_to_the_last_and_serves_again_after_a_free():
    held = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(block(16 * MIB))
    assert len(held) == 16
    held.pop()
    assert block(16 * MIB).numel() == 16 * MIB


def test_the_process_is_healthy_after_an_out_of_memory():
    weight = torch.ones(100, 100, device="cuda", requires_grad=True)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            block(1 << 30)
        (weight * weight).sum().backward()  # no cuBLAS: torch keeps its workspace
        torch.cuda.synchronize()
    assert weight.grad is not None and weight.grad.shape == (100, 100)


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def heap_in_use() -> int:
    """Bytes that malloc has given out: exact, where the resident size is not."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_thousand_out_of_memory_errors_leak_nothing():
    def fail(times: int) -> None:
        for _ in range(times):
            try:
                block(1 << 30)
            except torch.OutOfMemoryError:
                continue
            raise AssertionError("it fitted")

    fail(200)
    heap, rss, blocks = heap_in_use(), resident(), _C.host_blocks()
    ooms = memopt.cuda.memory_stats()["out_of_memory"]
    fail(1000)
    # The text alone is more than 150 bytes, an exception object 500.
    assert heap_in_use() - heap < 1000 * 20
    assert resident() - rss < 4 * MIB
    assert _C.host_blocks() == blocks
    assert memopt.cuda.memory_stats()["out_of_memory"] == ooms + 1000


def test_a_driver_error_is_a_runtime_error_and_no_out_of_memory():
    ooms = memopt.cuda.memory_stats()["out_of_memory"]
    sim.fail("cuMemAlloc_v2", code=ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError) as caught:
        block(1000)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert "cuMemAlloc(" in str(caught.value) and "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(caught.value)
    assert memopt.cuda.memory_stats()["out_of_memory"] == ooms
    assert block(1000).numel() == 1000


@pytest.mark.parametrize("function", ["cuCtxGetCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_failure_around_the_allocation_is_a_runtime_error_too(function: str):
    block(1000)
    sim.fail(function, code=ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match="cuStreamGetCaptureInfo"):
        _ = torch.empty_like(torch.empty(1000), device="cuda")
    sim.fail_clear()


def test_an_out_of_memory_of_the_driver_below_capacity_is_one_too():
    sim.fail("cuMemAlloc_v2")  # its natural error
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        block(1000)


def test_frees_that_fail_are_counted_and_never_thrown():
    before = memopt.cuda.memory_stats()
    x = block(1000)
    address, size = x.data_ptr(), x.numel()
    sim.fail("cuMemFree_v2", code=ILLEGAL_ADDRESS)
    del x
    after = memopt.cuda.memory_stats()
    assert after["failed_frees"] == before["failed_frees"] + 1
    assert after["live_blocks"] == before["live_blocks"] + 1  # it is still there
    free = ctypes.CDLL(_C.__file__).memopt_free
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free(address, size, 0, None)
    assert memopt.cuda.memory_stats()["live_blocks"] == before["live_blocks"]


def test_a_tensor_without_elements_asks_for_nothing():
    before = memopt.cuda.memory_stats()["allocations"]
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert memopt.cuda.memory_stats()["allocations"] == before


class Greedy(torch.autograd.Function):
    """Its backward asks for more than there is."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        block(1 << 30)
        return gradient


def test_an_out_of_memory_in_an_autograd_thread_reaches_the_caller():
    x = torch.ones(100, device="cuda", requires_grad=True)
    for _ in range(20):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            Greedy.apply(x).sum().backward()
    (x * 2).sum().backward()
    assert x.grad is not None


def test_an_out_of_memory_inside_torchs_own_backward_reaches_the_caller():
    x = torch.ones(30 * MIB // 4, device="cuda", requires_grad=True)
    y = (x * x).sum()
    held = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(block(8 * MIB))
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()
    held.clear()
    y = (x * x).sum()
    y.backward()
    assert x.grad is not None


def test_threads_meet_out_of_memory_each_for_itself():
    outcomes: list[int] = []

    def work() -> None:
        caught = 0
        for i in range(200):
            try:
                block(1 << 30 if i % 2 else 1000)
            except torch.OutOfMemoryError:
                caught += 1
        outcomes.append(caught)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [100] * 4


# ---- the end of the process, and children of it ----------------------------------------------------------------------

INSTALLED = """
import memopt, memopt.sim
memopt.sim.activate(memory="256MiB")
import torch
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
"""


def test_an_exit_with_live_tensors_has_the_scripts_status(run_script):
    done = run_script(INSTALLED + "x = [block(1000) for _ in range(10)]\nraise SystemExit(7)\n")
    assert (done.returncode, done.stderr) == (7, "")


def test_an_out_of_memory_that_nobody_catches_is_a_traceback(run_script):
    done = run_script(INSTALLED + "x = block(1000)\nblock(1 << 30)\n")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB" in done.stderr
    assert "terminate called" not in done.stderr


def test_an_exit_right_after_an_out_of_memory_in_backward_is_quiet(run_script):
    done = run_script(
        INSTALLED
        + """
class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return block(1 << 30)
x = torch.ones(100, device="cuda", requires_grad=True)
try:
    Greedy.apply(x).sum().backward()
except torch.OutOfMemoryError:
    print("caught")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", "")


def test_a_forked_child_drops_tensors_quietly_and_the_parent_goes_on(run_script):
    done = run_script(
        INSTALLED
        + """
import os, warnings
warnings.simplefilter("ignore")
x = block(1000)
child = os.fork()
if child == 0:
    del x
    stats = memopt.cuda.memory_stats()
    os._exit(0 if stats["failed_frees"] == 0 and stats["live_blocks"] == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert memopt.cuda.memory_stats()["live_blocks"] == 1
del x
assert memopt.cuda.memory_stats()["failed_frees"] == 0
assert memopt.sim.stats()["allocations"] == 0
"""
    )
    assert done.returncode == 0, done.stderr


def test_an_allocation_during_a_graph_capture_is_refused_and_the_process_stays_healthy():
    kept = torch.zeros(8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA graph is captured") as caught:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kept + 1
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert block(MIB).numel() == MIB and torch.equal(kept.cpu(), kept.cpu())


def test_asking_for_the_allocator_and_the_doctor_makes_no_context():
    contexts = sim.calls("cuDevicePrimaryCtxRetain")
    memopt.cuda.allocator()
    memopt.doctor()
    assert sim.calls("cuDevicePrimaryCtxRetain") == contexts
