"""memopt's hooks under real torch: an allocation that fails leaves memopt_malloc as torch's own exception, thrown from
C, and what cannot be raised is counted and told. (Without torch: tests/c/test_torch_hooks.c, test_torch_throw.c.)"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import warnings

import pytest
import torch

import memopt
from memopt import _C, sim

SIM = {"memory": "256MiB"}
MIB = 1 << 20
ILLEGAL_ADDRESS = 700


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """As a user would, before the first allocation of the process."""
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def live() -> tuple[int, int]:
    stats = memopt.cuda.memory_stats()
    return stats["live_blocks"], stats["live_bytes"]


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
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 256.00 MiB of which "
    )
    assert text.endswith("What would help: a smaller tensor, since this one is larger than the device.")
    assert isinstance(caught.value, RuntimeError) and torch.cuda.OutOfMemoryError is torch.OutOfMemoryError


def test_the_first_words_are_those_of_torchs_own_allocator(run_script):
    source = """
import memopt.sim
memopt.sim.activate(memory="256MiB")
import torch, memopt
{allocator}
x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error).partition("which")[0])
"""
    torchs = run_script(source.format(allocator=""))
    ours = run_script(
        source.format(allocator="torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())")
    )
    assert ours.stdout == torchs.stdout != "", torchs.stderr + ours.stderr


def test_the_text_tells_what_memopt_holds():
    held = [block(10 * MIB) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match=r"memopt holds .* 30.00 MiB in live tensors"):
        block(1 << 30)
    del held


def test_a_device_is_filled_to_the_last_and_serves_again_after_a_free():
    held = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(block(16 * MIB))
    assert len(held) >= 15  # and what torch itself holds, if it does
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


THROWS = 100_000 if os.environ.get("MEMOPT_SOAK") == "1" else 1000


def test_many_out_of_memory_errors_leak_nothing():
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
    fail(THROWS)
    # The text alone is more than 300 bytes, an exception object 500.
    assert heap_in_use() - heap < 1000 * 20
    assert resident() - rss < 4 * MIB
    assert _C.host_blocks() == blocks
    assert memopt.cuda.memory_stats()["out_of_memory"] == ooms + THROWS


def test_a_driver_error_is_a_runtime_error_and_no_out_of_memory():
    torch.cuda.empty_cache()
    ooms = memopt.cuda.memory_stats()["out_of_memory"]
    sim.fail("cuMemCreate", count=1000, code=ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError) as caught:
        block(64 * MIB)
    sim.fail_clear()
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert "cuMemCreate(" in str(caught.value) and "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(caught.value)
    assert memopt.cuda.memory_stats()["out_of_memory"] == ooms
    assert block(64 * MIB).numel() == 64 * MIB


@pytest.mark.parametrize("function", ["cuCtxGetCurrent", "cuMemMap", "cuMemSetAccess"])
def test_a_failure_on_the_way_is_a_runtime_error_too(function: str):
    torch.cuda.empty_cache()
    sim.fail(function, count=1000, code=ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        block(64 * MIB)
    sim.fail_clear()
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert block(64 * MIB).numel() == 64 * MIB


def test_an_out_of_memory_of_the_driver_below_capacity_is_one_too():
    torch.cuda.empty_cache()
    sim.fail("cuMemCreate", count=1000)  # its natural error
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        block(64 * MIB)


# ---- misuse: refused, counted, and told when memopt is next asked something ------------------------------------------


LIBRARY = ctypes.CDLL(_C.__file__)
FREE = LIBRARY.memopt_free
FREE.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
FREE.restype = None


def misuse(words: str) -> None:
    """The next question warns of it, and only that one."""
    with pytest.warns(RuntimeWarning, match=f"memopt's allocator refused {words}"):
        memopt.cuda.memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.cuda.memory_stats()


def test_a_double_free_is_refused_and_told():
    x = block(1000)
    address = x.data_ptr()
    del x
    FREE(address, 1000, 0, None)
    misuse("1 frees of memory that was already free$")
    assert block(1000).data_ptr() == address  # it is free once, so one tensor has it


def test_foreign_addresses_are_refused_and_told():
    x = block(5000)
    FREE(0x1234500, 100, 0, None)
    FREE(0x1234500, 100, 7, None)
    FREE(x.data_ptr(), 5000, -1, None)
    misuse("3 frees of addresses that memopt never allocated$")
    FREE(x.data_ptr() + 512, 100, 0, None)  # inside a block: memopt's, and no start of a live one
    misuse("1 frees of ")
    x.copy_(torch.arange(5000) % 7)
    assert torch.equal(x.cpu(), (torch.arange(5000) % 7).byte())
    finding = next(f for f in memopt.doctor().findings if f.topic == "allocator")
    assert finding.state == "broken" and "frees of addresses that memopt never allocated" in finding.text


def test_torch_refuses_a_double_free_of_its_own_before_memopt_sees_it():
    address = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(address)
    with pytest.raises(RuntimeError):
        torch.cuda.caching_allocator_delete(address)
    assert _C.allocator_misuse()["failed_releases"] == 0


def test_a_second_registration_is_refused_by_torch_and_changes_nothing():
    x = block(1000)
    with pytest.raises(RuntimeError, match="already initialized"):
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    assert _C.allocator_is_current() and torch.cuda.memory.get_allocator_backend() == "pluggable"
    del x


def test_releases_and_ends_out_of_turn_are_counted_and_change_nothing():
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    misuse("2 ends of private pools that were not begun$")
    assert block(1000).numel() == 1000


def test_releases_that_fail_are_counted_and_never_thrown():
    x = block(64 * MIB)
    del x
    sim.fail("cuMemRelease", count=1, code=ILLEGAL_ADDRESS)
    torch.cuda.empty_cache()
    sim.fail_clear()
    misuse("1 pieces of memory that the driver refused to free$")
    torch.cuda.empty_cache()


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


@pytest.mark.sampled("processes that end")
def test_an_exit_with_live_tensors_has_the_scripts_status(run_script):
    done = run_script(INSTALLED + "x = [block(1000) for _ in range(10)]\nraise SystemExit(7)\n")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.sampled("processes that end")
def test_an_out_of_memory_that_nobody_catches_is_a_traceback(run_script):
    done = run_script(INSTALLED + "x = block(1000)\nblock(1 << 30)\n")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB" in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.sampled("processes that end")
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
    misuse = memopt._C.allocator_misuse()
    refused = sum(misuse.values()) - misuse["in_child"]
    os._exit(0 if misuse["in_child"] == 1 and refused == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert memopt.cuda.memory_stats()["live_blocks"] == 1
del x
assert memopt.cuda.memory_stats()["failed_frees"] == memopt.cuda.memory_stats()["live_blocks"] == 0
torch.cuda.empty_cache()
assert memopt.sim.stats()["bytes"] == 0
"""
    )
    assert done.returncode == 0, done.stderr


def test_asking_for_the_allocator_and_the_doctor_makes_no_context():
    contexts = sim.calls("cuDevicePrimaryCtxRetain")
    memopt.cuda.allocator()
    memopt.doctor()
    assert sim.calls("cuDevicePrimaryCtxRetain") == contexts
