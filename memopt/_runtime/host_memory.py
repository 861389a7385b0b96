"""Host memory as the kernel counts it: what a process has, and what its cgroup or the machine lets it have."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident bytes of a process, shared pages included. Raises OSError if there is no such process."""
    return _statm(pid)[1]


def address_space_bytes() -> int:
    """Return the bytes of address space that this process has mapped, which RLIMIT_AS limits."""
    return _statm("self")[0]


def own_bytes() -> int:
    """Return the resident bytes of this process, without shared pages and files' pages."""
    _, resident, shared, *_ = _statm("self")
    return resident - shared


def _statm(pid: int | str) -> list[int]:
    with open(f"/proc/{pid}/statm", "rb") as file:
        pages = file.read().split()
    if not pages:
        raise ProcessLookupError(f"process {pid} has ended")
    return [int(count) * _PAGE for count in pages]


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident bytes since reset_peak_resident().

    (rusage starts with the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def reset_peak_resident() -> bool:
    """Begin the peak again at what is in memory now. False: the kernel does not allow it, and the peak stays that of
    the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def children(pid: int) -> list[int]:
    """Return the child processes of a process that still exist."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, and their descendants."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


# ---- what a process may have -----------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """size: bytes, None where none is known; where: in words; kills: how often the kernel's out-of-memory killer has
    struck there, None where that is not counted."""

    size: int | None
    where: str
    kills: int | None


def limit_of(pid: int | str = "self", proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> Limit:
    """Return the tightest of a process's limits."""
    found = [_machine(Path(proc))]
    kills: int | None = None
    for folder in _groups(Path(proc) / str(pid) / "cgroup", Path(cgroups)):
        for name in ("memory.max", "memory.limit_in_bytes"):
            size = _number(folder / name)
            if size is not None:
                found.append(Limit(size, f"the cgroup's ({folder / name})", None))
        counted = _killed(folder / "memory.events") or _killed(folder / "memory.oom_control")
        kills = counted if kills is None else max(kills, counted or 0)
    tightest = min(
        (limit for limit in found if limit.size is not None), key=lambda one: one.size or 0, default=None
    )
    return Limit(tightest.size, tightest.where, kills) if tightest else Limit(None, "unknown", kills)


def available(
    pid: int | str = "self", proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", *, swap: bool = True
) -> int | None:
    """Bytes that can still be taken without meeting a limit, page cache counted as free, and swap if it is wanted; None
    where nothing is known."""
    machine = {
        name: int(size.split()[0]) << 10
        for name, _, size in (line.partition(":") for line in _lines(Path(proc) / "meminfo"))
    }
    found = (
        [machine["MemAvailable"] + (machine.get("SwapFree", 0) if swap else 0)]
        if "MemAvailable" in machine
        else []
    )
    for folder in _groups(Path(proc) / str(pid) / "cgroup", Path(cgroups)):
        for most, now in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / most), _number(folder / now)
            if limit is not None and used is not None:
                found.append(max(0, limit - used + _page_cache(folder / "memory.stat")))
    return min(found, default=None)


def _page_cache(file: Path) -> int:
    """Return the bytes of a cgroup's file pages that the kernel drops when it needs memory."""
    stat = dict(line.split(" ", 1) for line in _lines(file) if " " in line)
    return sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def _machine(proc: Path) -> Limit:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            return Limit(int(line.split()[1]) << 10, "the machine's", None)
    return Limit(None, "unknown", None)


def _groups(file: Path, cgroups: Path) -> list[Path]:
    """Return the process's cgroup and its ancestors, innermost first, as far as they are visible."""
    for line in _lines(file):
        _, controllers, path = line.split(":", 2)
        root = cgroups if not controllers else cgroups / "memory"
        if not controllers or "memory" in controllers.split(","):
            inner = root / path.lstrip("/")
            return [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    return []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    # None for "max", or version 1's word for it.
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _killed(file: Path) -> int | None:
    for line in _lines(file):
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # not this kind of cgroup, or not to be seen from here
        return []
