"""The trace of memopt's allocator under torch: what it tells, what it is replayed as, stacks, threads and exits."""

import contextlib
import json
import threading
import time

import pytest
import torch

import memopt
from memopt import _C
from memopt.__main__ import main
from memopt.cuda import _statistics

SIM = {"memory": "4GiB"}
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def current():
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    torch.empty(1, device="cuda")
    yield
    _statistics.stop_trace()


def events(*wanted):
    return [event for event in _C.trace_read(0) if event[0] in wanted]


def replay(path, capsys):
    assert main(["replay", str(path), "--json", "--check"]) == 0
    return json.loads(capsys.readouterr().out)


def test_requests_are_in_the_trace_in_order():
    _statistics.record_trace(capacity=1000)
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    address, side = x.data_ptr(), torch.cuda.Stream()
    x.record_stream(side)
    _statistics.trace_step()
    del x
    seen = events("alloc", "free", "record_stream", "step")
    assert [event[0] for event in seen] == ["alloc", "record_stream", "step", "free"]
    alloc, used, step, freed = seen
    assert alloc[3] == used[3] == freed[3] == address and alloc[4] == 3 * MIB
    assert alloc[2] == used[2] == freed[2] > 0  # the serial
    assert used[5] == side.cuda_stream and alloc[5] == 0
    assert alloc[1] <= used[1] <= step[1] <= freed[1]
    assert all(event[7] == 0 for event in seen)


def test_a_stopped_trace_keeps_what_it_has_and_takes_no_more():
    _statistics.record_trace(capacity=1000)
    torch.empty(MIB, device="cuda")
    _statistics.stop_trace()
    before = _C.trace_read(0)
    torch.empty(MIB, device="cuda")
    assert _C.trace_read(0) == before and before
    assert _C.trace_state(0)[:2] == (False, 1000)
    _statistics.record_trace(capacity=1000, clear=False)
    assert _C.trace_read(0) == before
    _statistics.record_trace(capacity=1000)
    assert _C.trace_read(0) == []


def test_a_saved_trace_is_replayed_with_its_live_peak(tmp_path, capsys):
    before = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    _statistics.record_trace()
    for step in range(3):
        kept = [torch.empty((step + i) * MIB + 1, dtype=torch.uint8, device="cuda") for i in range(4)]
        del kept
        _statistics.trace_step()
    path = tmp_path / "trace.txt"
    _statistics.save_trace(path)
    found = replay(path, capsys)
    assert found["steps"] == 3 and found["operations"] == 1 + 3 * 8 + others(path)
    assert found["live_peak"] == 5 * MIB + sum((2 + i) * MIB + 1 for i in range(4)) + other_bytes(path)
    del before


def lines(path):
    return [line.split() for line in path.read_text().splitlines()]


def others(path):
    """Blocks of this process that are no part of the test."""
    freed = {line[1] for line in lines(path) if line[0] == "f"}
    return sum(line[0] == "a" and line[1] not in freed for line in lines(path)) - 1


def other_bytes(path):
    freed = {line[1] for line in lines(path) if line[0] == "f"}
    return sum(int(line[2]) for line in lines(path) if line[0] == "a" and line[1] not in freed) - 5 * MIB


def test_stacks_name_the_python_that_asked():
    _statistics.record_trace(capacity=1000, stacks=True)

    def who_asks():
        return torch.empty(MIB, device="cuda")

    x, y = who_asks(), who_asks()
    first, second = events("alloc")
    frames = _C.trace_stack(first[7])
    assert [frame[1] for frame in frames[:2]] == ["who_asks", "test_stacks_name_the_python_that_asked"]
    assert all(frame[0] == __file__ for frame in frames[:2])
    assert frames[0][2] == who_asks.__code__.co_firstlineno + 1
    assert first[7] == second[7]  # asked for on one line
    del x, y
    _statistics.record_trace(capacity=1000, stacks=False)
    who_asks()
    assert events("alloc")[0][7] == 0


def test_stacks_are_taken_on_autograds_threads():
    weight = torch.zeros(512, 512, device="cuda", requires_grad=True)
    loss = (weight * 2).sum()
    _statistics.record_trace(capacity=1000, stacks=True)
    loss.backward()  # no Python runs there: no frames, and no harm
    assert events("alloc")
    _statistics.stop_trace()


def test_a_thread_that_allocates_and_one_that_frees_do_not_wait_for_each_other():
    """Stacks take the GIL in the midst of a request; the other thread frees with the GIL held."""
    _statistics.record_trace(capacity=100_000, stacks=True)
    blocks = []

    def allocate():
        for i in range(3000):
            while len(blocks) > 100:  # whoever frees is behind
                time.sleep(0)
            blocks.append(torch.empty(1 + i % 7 * MIB, dtype=torch.uint8, device="cuda"))

    def free():
        while blocks or any(thread.is_alive() for thread in allocating):
            with contextlib.suppress(IndexError):  # the other one had the last
                blocks.pop()

    # Daemons: what hangs is to fail, and not to hold up the process's end.
    allocating = [threading.Thread(target=allocate, daemon=True) for _ in range(2)]
    freeing = [threading.Thread(target=free, daemon=True) for _ in range(2)]
    for thread in (*allocating, *freeing):
        thread.start()
    for thread in (*allocating, *freeing):
        thread.join(120)
        assert not thread.is_alive()
    assert len(events("alloc")) > 5000
    _statistics.stop_trace()


def test_an_out_of_memory_is_an_event():
    _statistics.record_trace(capacity=1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    (oom,) = events("oom")
    assert oom[4] == 5 << 30


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="a trace holds 1 to 268435456 events, not 0"):
        _statistics.record_trace(capacity=0)
    with pytest.raises(ValueError, match="expected a device number from 0"):
        _statistics.record_trace(device=64)
    with pytest.raises(memopt.Error):
        _statistics.record_trace(device=7)


TRACED = """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch, memopt, threading, time
from memopt.cuda import _statistics
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
_statistics.record_trace(stacks=True)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(24)]).cuda()
def loop():
    while True:
        model(torch.zeros(64, 256, device="cuda")).sum().backward()
"""


@pytest.mark.sampled("processes that end")
def test_the_interpreter_ends_while_threads_allocate_with_stacks(run_script):
    ending = "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.3)\nprint('ends')\n"
    for _ in range(3):
        done = run_script(TRACED + ending)
        assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.sampled("processes that end")
def test_a_forked_child_ends_though_its_parent_notes_stacks(run_script):
    # The model is never freed: the parent's thread may have had torch's own mutex, for which the child would wait.
    ending = (
        "import ctypes, os\nctypes.pythonapi.Py_IncRef(ctypes.py_object(model))\n"
        "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.3)\n"
        "pid = os.fork()\nif not pid:\n    raise SystemExit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\nprint('ends')\n"
    )
    done = run_script(TRACED + ending)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
