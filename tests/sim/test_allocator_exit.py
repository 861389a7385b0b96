"""memopt's allocator at the end of the interpreter and in forked children: both are ordinary events."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

SIM = None
ROUNDS = 200 if os.environ.get("MEMOPT_SOAK") == "1" else 3

INSTALLED = """
import memopt.sim
memopt.sim.activate(memory="256MiB")
import torch, memopt
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
"""

IN_THE_MIDST_OF_IT = (
    INSTALLED
    + """
layers = [torch.nn.Linear(64, 64) for _ in range(24)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.zeros(64, 64, device="cuda")).sum().backward()
    optimizer.step()
graph = torch.cuda.CUDAGraph()
static = torch.zeros(1000, device="cuda")
with torch.cuda.graph(graph):
    result = static + 1
memopt.sim.lazy(True)
streams = [torch.cuda.Stream() for _ in range(3)]
for stream in streams:
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 18, device="cuda")
        event = stream.record_event()
    x.record_stream(streams[0])
del x
graph.replay()
model(torch.zeros(64, 64, device="cuda")).sum().backward()
print("ends")
"""
)


@pytest.mark.sampled("processes that end")
def test_exits_with_live_tensors_autograd_threads_and_pending_events_have_the_scripts_status(run_script):
    with ThreadPoolExecutor(2) as pool:  # two at once: more orders of the threads are met
        done = list(pool.map(lambda _: run_script(IN_THE_MIDST_OF_IT), range(ROUNDS)))
    assert [(script.returncode, script.stdout) for script in done] == [(0, "ends\n")] * ROUNDS, done[0].stderr


@pytest.mark.sampled("processes that end")
def test_threads_that_allocate_while_the_interpreter_ends_do_not_hinder_it(run_script):
    done = run_script(
        INSTALLED
        + """
import threading, time
def loop():
    while True:
        torch.zeros(1000, device="cuda", requires_grad=True).sum().backward()
for _ in range(3):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.5)
print("ends")
"""
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.sampled("processes that end")
def test_workers_that_inherit_cuda_tensors_end_well_and_the_parent_goes_on(run_script):
    done = run_script(
        INSTALLED
        + """
import gc, sys, os, multiprocessing
from torch.utils.data import DataLoader, Dataset

class Inherits(Dataset):
    def __init__(self):
        self.device = [torch.zeros(1000, device="cuda") for _ in range(10)]
    def __len__(self):
        return 64
    def __getitem__(self, i):
        self.device = None  # the copy of the worker
        gc.collect()
        return torch.full((3,), i)

data = Inherits()
loader = DataLoader(data, batch_size=4, num_workers=4, multiprocessing_context="fork")
batches = iter(loader)
workers = batches._workers
assert sum(len(batch) for batch in batches) == 64
for worker in workers:
    worker.join(600)
assert [worker.exitcode for worker in workers] == [0] * 4, [worker.exitcode for worker in workers]

def drops():
    data.device.clear()
    torch.cuda.empty_cache()
    memopt.cuda.memory_stats()
    try:
        torch.zeros(10, device="cuda")
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("a child allocated")

children = [multiprocessing.get_context("fork").Process(target=drops) for _ in range(4)]
for child in children:
    child.start()
for child in children:
    child.join(600)
assert [child.exitcode for child in children] == [0] * 4

child = os.fork()
if child == 0:
    data.device.clear()
    sys.exit(0)  # all of an interpreter's end, static destructors too
assert os.waitpid(child, 0)[1] == 0
assert memopt.cuda.memory_stats()["live_blocks"] == 10
data.device.clear()
assert memopt.cuda.memory_stats()["live_blocks"] == memopt.cuda.memory_stats()["failed_frees"] == 0
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("processes that end")
def test_a_fork_at_any_moment_of_threads_that_allocate_ends_well(run_script):
    """A lock that a thread of the parent holds is held for ever in the child. That is so of torch's own mutex around
    its list of what a pluggable allocator gave it, whichever allocator that is: a child that frees a tensor may wait
    for ever where the parent's threads allocate. So this child asks all of memopt that takes a lock of memopt's, and
    frees by memopt's hook, as torch calls it once it has its mutex."""
    done = run_script(
        INSTALLED
        + """
import ctypes, os, threading, time, warnings
warnings.simplefilter("ignore")
stop = False
def loop():
    while not stop:
        x = [torch.empty(n, device="cuda") for n in (100, 100000, 1000000)]
        x[1].record_stream(torch.cuda.current_stream())
threads = [threading.Thread(target=loop, daemon=True) for _ in range(2)]
kept = [torch.zeros(1000, device="cuda") for _ in range(10)]
addresses, stream = [x.data_ptr() for x in kept], torch.cuda.current_stream().cuda_stream
free = ctypes.CDLL(memopt._C.__file__).memopt_free
free.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
for thread in threads:
    thread.start()
children = []
for _ in range(20):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        for address in addresses:
            free(address, 4000, 0, stream)
        torch.cuda.empty_cache()
        memopt.cuda.memory_stats()
        os._exit(0)
    children.append(child)
deadline = time.monotonic() + 600
for child in children:
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "a child hangs"
        time.sleep(0.01)
    assert ended[1] == 0, ended
stop = True
for thread in threads:
    thread.join()
print("ends")
"""
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
