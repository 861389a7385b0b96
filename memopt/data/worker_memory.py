"""A process's resident memory by what it is, from /proc/<pid>/smaps_rollup."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class WorkerMemory(NamedTuple):
    """Bytes. resident: as `top` shows it; pss: with what n processes share counted an nth; dirty: written to, and in
    no other process, copies of a parent's pages among it; file: pss of files, page cache that the kernel takes back
    when it wants it; shared: pss of shared memory, SharedList's among it; anonymous: pss of the rest, in no
    file."""

    resident: int
    pss: int
    dirty: int
    file: int
    shared: int
    anonymous: int


def memory_of(pid: int, proc: str = "/proc") -> WorkerMemory | None:
    """None of a process that is gone, or not ours to look into."""
    try:
        text = (Path(proc) / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    fields = {}
    for line in text.splitlines()[1:]:
        name, _, size = line.partition(":")
        fields[name] = int(size.split()[0]) << 10
    return WorkerMemory(
        fields.get("Rss", 0),
        fields.get("Pss", 0),
        fields.get("Private_Dirty", 0),
        fields.get("Pss_File", 0),
        fields.get("Pss_Shmem", 0),
        fields.get("Pss_Anon", 0),
    )
