"""What kind of file system a path is on, by the kernel's list of mounts."""

from __future__ import annotations

import os

NETWORKED = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "glusterfs",
    "virtiofs",
)


def type_of(path: str) -> str:
    """The file system's type ("ext4", "nfs4", …) of a path or of its nearest ancestor that exists; "" if unknown."""
    here = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape").rstrip("/")
        inside = here == point or here.startswith(f"{point}/")
        if inside and len(point) >= best:  # of two on one point the later covers the earlier
            best, kind = len(point), after.split()[0]
    return kind


def keeps_unlinked_files(path: str) -> bool:
    """Whether a file that another machine removes stays for those who have it mapped. On a network file system it does
    not: touching the mapping would end the process (SIGBUS), so files are read there instead."""
    return not type_of(path).startswith(NETWORKED)
