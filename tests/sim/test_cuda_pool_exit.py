"""CudaPool where a process ends or forks, and on two devices: each in an interpreter of its own."""

import pytest

SIM = None

BEGIN = """
import os, sys, threading, time, warnings
import memopt.sim
memopt.sim.activate(memory="1GiB", devices=2)
import torch, memopt.cuda
warnings.simplefilter("ignore")
if {own}:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
pool = memopt.cuda.CudaPool("100MiB")
t = pool.allocate("10MiB")
"""

ENDS = {
    "by_sys_exit_inside_the_context_with_another_pool_paused": """
memopt.cuda.CudaPool("10MiB").pause()
with pool:
    sys.exit(0)
""",
    "with_the_context_open_after_a_backward": """
pool.__enter__()
x = torch.ones(1000, device="cuda", requires_grad=True)
(x * 2).sum().backward()
""",
    "with_a_thread_that_goes_on_allocating": """
def work():
    while True:
        with pool: y = torch.empty(1 << 20, device="cuda")
        pool.allocate(1000)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    "with_a_pool_dropped_during_a_capture": """
graph, x = torch.cuda.CUDAGraph(), torch.empty(1000, device="cuda")
other = memopt.cuda.CudaPool("10MiB")
other.allocate(100)
with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
    x.zero_()
    del other
""",
    "after_a_fork": """
child = os.fork()
if not child:
    del t
    for call in (pool.pause, pool.__enter__, lambda: pool.allocate(10)):
        try:
            call()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError(call)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert pool.stats()["allocations"] == 1
""",
}


@pytest.mark.sampled("processes that end")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("allocator", ["memopt", "native"])
def test_a_process_ends_well(run_script, allocator, end):
    done = run_script(BEGIN.format(own=allocator == "memopt") + ENDS[end])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("allocator", ["memopt", "native"])
def test_each_device_has_pools_of_its_own(run_script, allocator):
    done = run_script(
        BEGIN.format(own=allocator == "memopt")
        + """
other = memopt.cuda.CudaPool("64MiB", device=1)
u = other.allocate("10MiB")
assert u.device == other.device == torch.device("cuda", 1)

def made():
    return [torch.empty(1 << 20, device=f"cuda:{i}") for i in (0, 1)]

def where(tensors):
    return [[p._memory.holds(t.data_ptr()) for t in tensors] for p in (pool, other)]

with other:
    assert where(made_inside := made()) == [[False, False], [False, True]]
    with pool:
        assert where(made_inside := made()) == [[True, False], [False, True]]
assert where(made_outside := made()) == [[False, False], [False, False]]
del made_inside, made_outside
u.copy_(torch.full((10 << 20,), 7, dtype=torch.uint8))
before = memopt.sim.stats(1)["bytes"]
other.pause()
assert before - memopt.sim.stats(1)["bytes"] == 64 << 20
other.resume()
assert bool((u.cpu() == 7).all())
try:
    other.free(t)
except ValueError as error:
    assert "the tensor is on cuda:0, but this pool is on cuda:1" in str(error), error
with torch.cuda.device(1):
    assert memopt.cuda.CudaPool().device == torch.device("cuda", 1)
try:
    memopt.cuda.CudaPool(device=2)
except ValueError as error:
    assert "torch sees 2 CUDA devices" in str(error), error
else:
    raise AssertionError
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
