"""Leases: one process makes an entry, and others wait instead of making it too.

A lease is a symbolic link beside the entry that names its holder: it is there with its name or not at all, so that one
taken by a process that is killed the moment after can be told, too. Nothing hangs on it being right: who ignores it, or
breaks it, does the work twice and no more.

It cannot be stuck. Of a holder on this machine the kernel says whether it lives; of any other only time does, by the
folder's own clock: a lease older than `SECONDS` is nobody's."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable

SECONDS = 60.0
"""Lifetime of a lease whose process cannot be asked; values that take longer to make are made by others too."""
POLL_SECONDS = (0.001, 0.05)
"""First and longest pause between two looks at whether the entry is there."""


@functools.cache
def _machine() -> str:
    """An identity of this machine, since it was started, and of this space of process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.uname().nodename} {uuid.getnode()}"


def _started(pid: int) -> str | None:
    """Start time of a process of this machine, in the kernel's ticks: with it a process id is never taken for
    another's.
    None: there is none such, or only its corpse."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


@functools.lru_cache(1)
def _holder(pid: int) -> str:
    return f"{_machine()} {pid} {_started(pid)}"


def take(path: str) -> bool | None:
    """True: the caller holds the lease now. False: another does. None: no lease can be had here."""
    holder = _holder(os.getpid())
    try:
        try:
            os.symlink(holder, path)
        except FileNotFoundError:  # the first of its folder
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(holder, path)
    except FileExistsError:
        return False
    except OSError:
        return None  # a folder in which nothing can be written has no leases either
    return True


def release(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def is_held(path: str, now: Callable[[], float]) -> bool:
    """Whether somebody alive still seems to be at it. now: seconds by the clock of the folder's file system."""
    try:
        holder, written = os.readlink(path), os.lstat(path).st_mtime
    except OSError:
        return False
    *machine, pid, started = ["", "", *holder.split(" ")]
    if " ".join(machine).strip() == _machine() and pid.isdigit():
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
