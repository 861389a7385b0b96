"""A process whose descendants end with it, whatever process groups and sessions they have moved to."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from memopt import _C


class _Told(BaseException):
    """Raised when this process is told to end."""


def fork_watched() -> None:
    """Continue in a forked child, which this process watches.

    This process waits for the child, ends the processes that it has left behind, and ends with its status. Told to end
    (SIGTERM), or left by its own parent, it ends all of them.
    """
    parent = os.getppid()
    _C.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _tell)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, pid, options) is None and os.getppid() == parent:
            time.sleep(0.02)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    except _Told:
        pass
    _end_as(_end_all(pid))


def _tell(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends all of it: who asks again need not stop that
    raise _Told


def _end_all(pid: int) -> int:
    """Kill all descendants and return the status of `pid`.

    A killed process leaves its children to this one, so it repeats until there are none, or none that this user may
    end.
    """
    status, beyond = 0, set[int]()
    while children := _children() - beyond:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:
                beyond.add(child)
        for child in children - beyond:
            _, ended = os.waitpid(child, 0)
            if child == pid:
                status = ended
    return status


def _children() -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if parent == os.getpid():
                found.add(int(name))
    return found


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:  # which nobody can set
            signal.signal(ended_by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [ended_by])
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))
