"""Let the process end with the script's own status while torch's autograd threads finish their work.

loss.backward() returns when the last gradient is there; its worker threads go on for a moment, dropping Python objects
of the graph. If the interpreter ends meanwhile, CPython before 3.14 kills such a thread in a C++ destructor, and the
process aborts (csrc/simcuda/exit.c). So the last exit function, registered before torch's own and therefore run after
them, waits until those threads sleep on their queues, and leaves a guard for one that wakes up later still.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from pathlib import Path

_WORKER = "pt_autograd"  # c10::setThreadName in torch/csrc/autograd/engine.cpp
_POLL_SECONDS = 0.002
_LIMIT_SECONDS = 2.0


def install(device: ctypes.CDLL) -> None:
    """Register the wait and the guard; to be called before torch is imported."""
    atexit.register(_at_exit, device)


def _at_exit(device: ctypes.CDLL) -> None:
    wait_for_workers(_LIMIT_SECONDS)
    device.simcuda_guard_exit()


def wait_for_workers(limit_seconds: float) -> bool:
    """Wait until every autograd worker has slept through two polls; return False if one did not within the limit.

    A worker that waits for the interpreter's lock wakes every 5 ms to ask again, so its count of context switches
    moves; the count of one that waits on its queue stands still. sleep() releases the lock.
    """
    deadline = time.monotonic() + limit_seconds
    still, before = 0, _worker_activity()
    while before and still < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS * (1 + 2 * still))
        after = _worker_activity()
        still = still + 1 if after == before and all(state == "S" for state, _ in after.values()) else 0
        before = after
    return True


def _worker_activity() -> dict[str, tuple[str, str]]:
    """Return by thread id (state letter, context switches so far) of this process's autograd workers."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            if not (thread / "comm").read_text().startswith(_WORKER):
                continue
            fields = dict(
                line.split(":", 1) for line in (thread / "status").read_text().splitlines() if ":" in line
            )
        except FileNotFoundError:  # the thread has ended since it was listed
            continue
        switches = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
        found[thread.name] = (fields["State"].split()[0], switches)
    return found
