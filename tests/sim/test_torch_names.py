"""The names of torch that memopt answers: whose answer it is before, during and after, and what is refused."""

from __future__ import annotations

import inspect

import pytest

SIM = None  # each test is a process of its own: an allocator cannot be taken back
pytestmark = pytest.mark.sampled(3)

BEGIN = """
import warnings
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
import memopt
import memopt.cuda

def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def fails(call, *words):
    try:
        call()
    except RuntimeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"{words}: was not refused")

NAMES = [name for name in dir(torch._C) if name.startswith(("_cuda_", "_accelerator_", "_set_cudnn"))]
def names():
    return {name: getattr(torch._C, name) for name in NAMES}
"""
SWAP = "torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())\n"


@pytest.fixture
def passes(run_script):
    def run(body: str, **environment: str) -> None:
        done = run_script(BEGIN + inspect.cleandoc(body).replace("SWAP", SWAP), **environment)
        assert done.returncode == 0, done.stderr

    return run


def test_torchs_own_allocator_answers_as_if_nothing_were_there(passes):
    passes("""
    before = block(5000)
    theirs, plain = names(), torch._C._cuda_memoryStats(0)
    memopt.cuda.allocator()  # taken, and not given to torch
    changed = [name for name in NAMES if getattr(torch._C, name) is not theirs[name]]
    assert "_cuda_memoryStats" in changed and "_cuda_memorySnapshot" in changed
    assert torch._C._cuda_memoryStats(0) == plain == theirs["_cuda_memoryStats"](0)
    x = block(1000)
    assert torch.cuda.memory_allocated() == 5120 + 1024 == torch.accelerator.memory_allocated()
    assert memopt.cuda.memory_stats()["live_blocks"] == 0
    torch.cuda.memory._record_memory_history(stacks="python")
    assert torch._C._cuda_isHistoryEnabled()
    y = block(1000)
    assert torch.cuda.memory._snapshot()["device_traces"][0][0]["action"] == "alloc"
    assert torch.cuda.memory_snapshot()[0]["is_expandable"] is False
    torch.cuda.memory._record_memory_history(None)
    for bad in ("x", 7, None):
        said = []
        for function in (torch._C._cuda_memoryStats, theirs["_cuda_memoryStats"]):
            try:
                function(bad)
            except Exception as error:
                said.append((type(error), str(error)))
        assert len(said) == 2 and said[0] == said[1]
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.MemPool()
    torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark is True
    """)


def test_a_name_that_was_imported_before_anything_is_answered_too(passes):
    passes("""
    from torch.cuda import max_memory_allocated, memory_allocated, memory_summary
    from torch.accelerator import memory_allocated as twin
    SWAP
    assert memory_allocated() == max_memory_allocated() == twin() == 0
    x = block(1000)
    assert memory_allocated() == max_memory_allocated() == twin() == 1024
    assert "1024 B" in memory_summary()
    """)


def test_before_the_first_use_of_cuda_memopt_answers_what_torch_would(passes):
    passes("""
    SWAP
    assert not torch.cuda.is_initialized()
    assert torch.cuda.memory_snapshot() == [] == torch.cuda.memory._snapshot()["segments"]
    assert torch.cuda.memory_stats() == {} == torch.accelerator.memory_stats()
    assert torch._C._cuda_isHistoryEnabled() is False
    assert not torch.cuda.is_initialized()
    torch.cuda.memory._record_memory_history(stacks="python")  # where scripts put it: first of all
    x = block(1000)
    assert [e["size"] for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "alloc"] == [1000]
    """)


def test_taking_it_twice_is_taking_it_once(passes):
    passes("""
    theirs = names()
    assert memopt.cuda.allocator() is memopt.cuda.allocator()
    ours = names()
    SWAP
    memopt.cuda.allocator()
    assert names() == ours
    x = block(1000)
    assert torch.cuda.memory_allocated() == 1024
    memopt.disable()
    assert names() == theirs
    """)


def test_disable_puts_back_what_was_there_and_allocator_comes_again(passes):
    passes("""
    import torch.cuda.memory as memory
    theirs = names()
    benchmark = type(torch.backends.cudnn).__dict__["benchmark"]
    def in_classes():
        return dict(vars(torch.UntypedStorage)), dict(vars(torch._C._CUDAGraph)), memory.MemPool.__init__
    own = in_classes(), benchmark.setter
    memopt.disable()  # nothing to do
    memopt.cuda.allocator()
    assert names() != theirs
    memopt.disable()
    memopt.disable()
    assert names() == theirs
    assert own == (in_classes(), benchmark.setter)
    SWAP
    x = block(1000)
    assert torch.cuda.memory_allocated() == 1024
    memopt.disable()
    fails(torch.cuda.memory_allocated, "does not yet support")
    assert memopt.cuda.memory_stats()["live_bytes"] == 1000
    assert memopt.cuda.memory_snapshot()[0]["allocated_size"] == 1024
    memopt.cuda.allocator()
    assert torch.cuda.memory_allocated() == 1024
    """)


def test_disable_needs_no_torch(run_script):
    done = run_script(
        "import sys, memopt\nmemopt.disable()\nassert not {'torch', 'memopt.cuda'} & set(sys.modules), sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_who_replaced_a_name_after_us_keeps_it_and_ours_forwards_from_then_on(passes):
    passes("""
    theirs = torch._C._cuda_memoryStats
    memopt.cuda.allocator()
    ours = torch._C._cuda_memoryStats
    torch._C._cuda_memoryStats = lambda device: ours(device)
    mine = torch._C._cuda_memoryStats
    memopt.disable()
    assert torch._C._cuda_memoryStats is mine
    x = block(1000)
    assert torch.cuda.memory_allocated() == 1024 and ours(0) == theirs(0)
    """)


def test_what_memopts_allocator_cannot_do_is_refused_naming_the_way_out(passes):
    passes("""
    import torch.multiprocessing.reductions
    SWAP
    fails(torch.cuda.MemPool, "memopt.cuda.CudaPool")  # before CUDA starts
    x = block(1000)
    fails(torch.cuda.MemPool, "memopt.cuda.CudaPool")
    fails(lambda: torch.multiprocessing.reductions.reduce_tensor(x), "another process", "tensor.cpu()")
    fails(lambda: torch.UntypedStorage._new_shared_cuda(0, b"", 0, 0, b"", 0, b"", False), "received")
    fails(lambda: torch._C._cuda_getCheckpointState(0, (0, 0)), "cudagraph_trees = False", "reduce-overhead")
    fails(lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 0), set()), "cudagraph_trees = False")
    assert torch.cuda.memory_allocated() == 1024
    """)


def test_what_would_do_nothing_silently_is_refused_and_what_asks_for_nothing_is_not(passes):
    passes("""
    theirs = torch._C._cuda_cudaCachingAllocator_enable
    SWAP
    torch.cuda.memory.caching_allocator_enable(False)  # before CUDA starts torch does nothing with any allocator
    x = block(1000)
    fails(lambda: torch.cuda.caching_allocator_enable(False), "memopt.cuda.trim()", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
    torch.cuda.caching_allocator_enable(True)
    if hasattr(torch.cuda.memory, "caching_allocator_disabled"):  # not in torch 2.10
        assert torch._C._cuda_cudaCachingAllocator_is_enabled() is True
        fails(torch.cuda.memory.caching_allocator_disabled().__enter__, "empty_cache()")
    fails(lambda: torch.cuda.memory._set_memory_metadata("layer 1"), "_record_memory_history")
    torch.cuda.memory._set_memory_metadata("")
    assert torch.cuda.memory._get_memory_metadata() == ""
    assert torch.cuda.memory_allocated() == 1024
    """)


def test_observers_are_told_of_an_out_of_memory_before_it_is_raised(passes):
    passes("""
    import threading
    SWAP
    told = []
    def first(*facts):
        told.append(("first", *facts))
        x = block(1000)  # what an observer asks for it gets
        assert torch.cuda.memory_snapshot() and x.numel() == 1000
        try:
            block(1 << 40)
        except torch.OutOfMemoryError:
            told.append("tells nobody")
        raise KeyError("the out-of-memory error comes all the same")
    torch._C._cuda_attach_out_of_memory_observer(first)
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: told.append(("second", *facts)))
    kept = block(300 << 20)
    assert not told
    def refused(size):
        try:
            block(size)
        except torch.OutOfMemoryError as error:
            assert "CUDA out of memory" in str(error)
        else:
            raise AssertionError("there was room")
    facts = lambda size: (0, size, 1 << 30, torch.cuda.mem_get_info()[0])
    for size in (1 << 40, 900 << 20):
        before = facts(size)
        refused(size)
        name, *said = told[0]
        assert name == "first" and tuple(said) == before, (told, before)
        assert told[1] == "tells nobody" and told[2][:3] == ("second", 0, size) and len(told) == 3
        told.clear()
    thread = threading.Thread(target=refused, args=(2 << 30,))
    thread.start(); thread.join()
    assert [entry[2] for entry in told if entry != "tells nobody"] == [2 << 30, 2 << 30]
    told.clear()
    try:
        torch._C._cuda_attach_out_of_memory_observer(None)
    except TypeError as error:
        assert "None cannot be" in str(error)
    else:
        raise AssertionError("nobody can be told")
    """)


def test_an_observer_is_told_by_the_threads_of_backward_and_not_while_the_process_ends(run_script):
    done = run_script(
        BEGIN
        + SWAP
        + """
import atexit
told = []
class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, y):
        return y + block(1 << 40).sum()

def at_the_end():
    fails(lambda: block(1 << 41), "CUDA out of memory")
    print("still raised", told)
atexit.register(at_the_end)  # before the observer is attached, so that it runs after that is let go
torch._C._cuda_attach_out_of_memory_observer(lambda device, size, total, free: told.append(size))
x = torch.ones(4, device="cuda", requires_grad=True)
fails(Greedy.apply(x).sum().backward, "CUDA out of memory")
assert told == [1 << 40], told
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"still raised [{1 << 40}]\n"


def test_tensors_of_the_cpu_are_shared_as_ever(passes):
    passes("""
    import torch.multiprocessing.reductions
    SWAP
    x = torch.arange(5)
    rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(x)
    assert torch.equal(rebuild(*arguments), x)
    reopen, handle = torch.multiprocessing.reductions.reduce_storage(x.untyped_storage())
    assert x.is_shared() and x.tolist() == [0, 1, 2, 3, 4]
    """)


def test_cudnn_benchmark_stays_off_with_one_warning_at_the_line_that_asked(passes):
    passes("""
    SWAP
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark = True
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            assert torch.backends.cudnn.benchmark is False
        torch.backends.cudnn.benchmark = False
    told = [warning for warning in caught if "cudnn.benchmark" in str(warning.message)]
    assert len(told) == 1 and told[0].filename == __file__, caught
    assert torch.backends.cudnn.benchmark is False
    convolved = torch.nn.functional.conv2d(
        torch.empty(2, 3, 16, 16, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")
    )
    assert convolved.shape == (2, 4, 14, 14)
    """)


def test_cudnn_benchmark_that_was_on_is_off_from_the_moment_the_allocator_is_memopts(passes):
    passes("""
    torch.backends.cudnn.benchmark = True
    given = memopt.cuda.allocator()
    assert torch.backends.cudnn.benchmark is True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.memory.change_current_allocator(given)
    assert torch.backends.cudnn.benchmark is False
    assert [w.filename for w in caught if "cudnn.benchmark" in str(w.message)] == [__file__]
    """)


def test_the_accelerators_cache_is_emptied(passes):
    passes("""
    SWAP
    x = block(100 << 20)
    del x
    assert torch.accelerator.memory_reserved() > 0
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() == 0
    """)


def test_threads_that_ask_while_the_names_come_and_go_are_answered(passes):
    passes("""
    import threading
    SWAP
    x = block(1000)
    done, wrong = threading.Event(), []
    def ask():
        while not done.is_set():
            try:
                if torch.cuda.memory_allocated() != 1024:
                    wrong.append("number")
            except RuntimeError as error:
                if "does not yet support" not in str(error):
                    wrong.append(error)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads: thread.start()
    for _ in range(200):
        memopt.disable()
        memopt.cuda.allocator()
    done.set()
    for thread in threads: thread.join()
    assert not wrong, wrong[:3]
    """)
