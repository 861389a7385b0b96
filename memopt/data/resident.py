"""How much of mapped files is in memory, by the kernel's own account."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable


def mapped_bytes(mappings: Iterable[mmap.mmap]) -> tuple[int, int]:
    """(page cache, own) bytes that this process has in memory of the files of these mappings, in all mappings of them.
    Own are the pages that it wrote to (Anonymous); the rest is the files'.

    Files are known by device and inode: the name says " (deleted)" once another file was renamed into its place."""
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in mappings]
    with open("/proc/self/smaps") as file:
        lines = [line.split(None, 5) for line in file]
    # A mapping's first line: addresses, rights, offset, device, inode, path. What stat() says of the device need not be
    # what is here (btrfs, overlayfs).
    heads = [line for line in lines if not line[0].endswith(":")]
    files = {_file(line) for line in heads if _holds_any(line[0], addresses)}
    resident = own = 0
    counted = False
    for line in lines:
        if not line[0].endswith(":"):
            counted = _file(line) in files
        elif counted and line[0] == "Rss:":
            resident += int(line[1]) << 10
        elif counted and line[0] == "Anonymous:":
            own += int(line[1]) << 10
    return resident - own, own


def _file(head: list[str]) -> tuple[str, str]:
    return head[3], head[4]


def _holds_any(extent: str, addresses: list[int]) -> bool:
    begin, end = (int(number, 16) for number in extent.split("-"))
    return any(begin <= address < end for address in addresses)
