"""Who is making an entry at the moment, so that others wait instead of making it too.

A lease is a file beside the entry. Nothing hangs on it being right: who ignores it, or breaks it, does the work twice
and no more. It cannot be stuck. Of a holder on this machine the kernel says whether it lives; of any other only time
does, by the folder's own clock: a lease older than `SECONDS` is nobody's."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable

SECONDS = 60.0
"""How long a lease is believed of a process that cannot be asked; what takes longer to make is made by others too."""
POLL_SECONDS = (0.001, 0.05)
"""First and longest pause between two looks at whether the entry is there."""


@functools.cache
def _machine() -> str:
    """What tells this machine, since it was started, and this space of process ids from any other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown {os.uname().nodename}"


def _started(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks: with it a process id is never taken for another's.
    None: there is none such, or only its corpse."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _myself() -> str:
    return f"{_machine()}\n{os.getpid()} {_started(os.getpid())}\n"


def take(path: str) -> bool:
    """True: the caller holds the lease now, or no lease can be had here, and is to make the entry."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    except OSError:
        return True  # a folder in which nothing can be written has no leases either
    try:
        os.write(descriptor, _myself().encode())
    except OSError:
        pass  # an empty lease is one by time alone
    finally:
        os.close(descriptor)
    return True


def release(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def is_held(path: str, now: Callable[[], float]) -> bool:
    """Whether somebody alive still seems to be at it. now: seconds by the clock of the folder's file system."""
    try:
        with open(path) as file:
            text, written = file.read(), os.fstat(file.fileno()).st_mtime
    except (OSError, UnicodeDecodeError):
        return False
    machine, _, holder = text.partition("\n")
    pid, _, started = holder.strip().partition(" ")
    if machine == _machine() and pid.isdigit() and _machine().partition(" ")[0] != "unknown":
        return _started(int(pid)) == started
    return now() - written < SECONDS


def wait(path: str, arrived: Callable[[], bool], now: Callable[[], float]) -> bool:
    """Waits until the entry has arrived (True), or its maker is gone or has had its time (False), whichever is first.
    So whoever waits waits `SECONDS` at most."""
    pause, longest = POLL_SECONDS
    end = time.monotonic() + SECONDS
    while True:
        if arrived():
            return True
        if not is_held(path, now) or time.monotonic() > end:
            return arrived()
        time.sleep(pause)
        pause = min(2 * pause, longest)
