"""The interpreter's end: whatever autograd threads, streams and tensors are at, the script's own status comes out."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

SIM = None
ROUNDS = 50 if os.environ.get("MEMOPT_SOAK") == "1" else 2

RIGHT_AFTER_BACKWARD = """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
layers = [torch.nn.Linear(256, 256) for _ in range(24)]
model = torch.nn.Sequential(*layers).cuda()
model(torch.zeros(64, 256, device="cuda")).sum().backward()
"""


@pytest.mark.sampled("processes that end")
def test_a_script_that_ends_right_after_backward_ends_well(run_script):
    with ThreadPoolExecutor(2) as pool:  # two at once: more orders of the threads are met
        done = list(pool.map(lambda _: run_script(RIGHT_AFTER_BACKWARD), range(ROUNDS)))
    assert [script.returncode for script in done] == [0] * ROUNDS, done[0].stderr


@pytest.mark.sampled("processes that end")
def test_the_scripts_own_status_comes_out(run_script):
    assert run_script(RIGHT_AFTER_BACKWARD + "import sys\nsys.exit(3)\n").returncode == 3


@pytest.mark.sampled("processes that end")
def test_an_exception_after_backward_is_status_one_with_its_traceback(run_script):
    done = run_script(RIGHT_AFTER_BACKWARD + "raise KeyError('mine')\n")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr and "terminate" not in done.stderr


@pytest.mark.sampled("processes that end")
def test_pending_work_live_tensors_and_events_do_not_hinder_the_end(run_script):
    done = run_script(
        RIGHT_AFTER_BACKWARD
        + "memopt.sim.lazy(True)\n"
        + "stream, event = torch.cuda.Stream(), torch.cuda.Event()\n"
        + "with torch.cuda.stream(stream):\n    x = torch.zeros(1 << 20, device='cuda')\n    event.record()\n"
        + "assert not event.query()\nprint('ends')\n"
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.sampled("processes that end")
def test_a_backward_in_a_daemon_thread_does_not_abort_the_end(run_script):
    done = run_script(
        RIGHT_AFTER_BACKWARD
        + "import threading, time\n"
        + "def loop():\n"
        + "    while True:\n        model(torch.zeros(64, 256, device='cuda')).sum().backward()\n"
        + "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.3)\n"
    )
    assert done.returncode == 0, done.stderr
