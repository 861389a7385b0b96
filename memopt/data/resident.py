"""How much of mapped files is in memory, by the kernel's own account."""

from __future__ import annotations

import os


def mapped_bytes(paths: set[str]) -> tuple[int, int]:
    """(page cache, own) bytes that this process has in memory of the files mapped from these paths. Own are the pages
    that it wrote to (Anonymous); the rest is the files'."""
    real = {os.path.realpath(path) for path in paths}
    resident = own = 0
    counted = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(None, 5)
            if not first[0].endswith(
                ":"
            ):  # a mapping's first line: addresses, rights, offset, device, inode, path
                counted = len(first) == 6 and first[5].rstrip("\n") in real
            elif counted and first[0] == "Rss:":
                resident += int(first[1]) << 10
            elif counted and first[0] == "Anonymous:":
                own += int(first[1]) << 10
    return resident - own, own
