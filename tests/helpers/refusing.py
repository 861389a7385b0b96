"""Runs a program for which the kernel has none of the system calls named, as in a container that forbids them:

python refusing.py unshare,landlock_create_ruleset PROGRAM [ARGUMENTS]

`shared_memory` among the names gives it an empty /dev/shm of its own, for which this process must be root's."""

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {"unshare": 272, "landlock_create_ruleset": 444},
    "aarch64": {"unshare": 97, "landlock_create_ruleset": 444},
}[platform.machine()]
ERRORS = {"unshare": errno.EPERM, "landlock_create_ruleset": errno.ENOSYS}
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
NEW_MOUNTS, PRIVATE, RECURSIVE = 0x20000, 1 << 18, 1 << 14
LOAD, JUMP_IF_EQUAL, RETURN, ALLOW, ERROR = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def hide_shared_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(NEW_MOUNTS)
        or libc.mount(None, b"/", None, PRIVATE | RECURSIVE, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), "no /dev/shm of its own")


def refuse(names: list[str]) -> None:
    steps = [(LOAD, 0, 0, 0)]
    for name in names:
        steps += [(JUMP_IF_EQUAL, 0, 1, NUMBERS[name]), (RETURN, 0, 0, ERROR | ERRORS[name])]
    steps.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(steps), code)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


if __name__ == "__main__":
    names = set(sys.argv[1].split(","))
    if "shared_memory" in names:
        hide_shared_memory()
    refuse(sorted(names & NUMBERS.keys()))
    os.execvp(sys.argv[2], sys.argv[2:])
