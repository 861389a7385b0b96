"""Ways in which a program changes files, each of which an estimate must keep from those of its user.

As a program: ways_to_write.py FOLDER, after prepare(FOLDER). Each way works on files of its own, named after it, and
says how it went; none may end the program."""

# ruff: noqa: SIM115 (left open, as programs do)
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gzip
import hashlib
import io
import mmap
import multiprocessing
import os
import posix
import shelve
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

WAYS: dict[str, Callable[[str], object]] = {}  # a function of the path to a file that is there
MARK = "precious"
SET_FLAGS, GET_FLAGS = 0x40086602, 0x80086601  # chattr's and lsattr's


def way(function: Callable[[str], object]) -> Callable[[str], object]:
    WAYS[function.__name__] = function
    return function


def shell(name: str, line: str) -> None:
    WAYS[name] = lambda path: subprocess.run(
        line, shell=True, cwd=os.path.dirname(path), env={"F": path, "PATH": os.environ["PATH"]}
    )


def lambdas(**ways: Callable[[str], object]) -> None:
    WAYS.update(ways)


lambdas(
    open_w=lambda p: open(p, "w").write("X"),
    open_a=lambda p: open(p, "a").write("X"),
    open_plus=lambda p: open(p, "r+").write("X"),
    path_write=lambda p: Path(p).write_text("X"),
    os_open_truncating=lambda p: os.write(os.open(p, os.O_WRONLY | os.O_TRUNC), b"X"),
    read_only_truncating=lambda p: os.open(p, os.O_RDONLY | os.O_TRUNC),
    file_io=lambda p: io.FileIO(p, "w").write(b"X"),
    posix_open=lambda p: os.write(posix.open(p, os.O_WRONLY | os.O_APPEND), b"X"),
    unlink=os.unlink,
    posix_unlink=posix.unlink,
    c_unlink=lambda p: ctypes.CDLL(None).unlink(p.encode()),
    c_truncate=lambda p: ctypes.CDLL(None).truncate(p.encode(), ctypes.c_long(0)),
    c_rename=lambda p: ctypes.CDLL(None).rename(p.encode(), (p + ".c").encode()),
    truncate=lambda p: os.truncate(p, 0),
    rename=lambda p: os.rename(p, p + ".renamed"),
    replaced=lambda p: (open(p + ".other", "w").write("X"), os.replace(p + ".other", p)),
    moved=lambda p: shutil.move(p, p + ".moved"),
    copied_over=lambda p: shutil.copy(__file__, p),
    new_beside=lambda p: open(p + ".new", "w").write("X"),
    new_folder=lambda p: os.makedirs(p + ".folder/deeper"),
    hard_link=lambda p: (os.link(p, p + ".hard"), open(p + ".hard", "r+").write("X")),
    symbolic_link=lambda p: (os.symlink(p, p + ".soft"), open(p + ".soft", "w").write("X")),
    pipe=lambda p: os.mkfifo(p + ".fifo"),
    chmod=lambda p: os.chmod(p, 0o777),
    fchmod=lambda p: os.fchmod(os.open(p, os.O_RDONLY), 0o777),
    chown=lambda p: os.chown(p, 12345, 12345),
    lchown=lambda p: os.lchown(p, 12345, 12345),
    utime=lambda p: os.utime(p, (1, 1)),
    attribute=lambda p: os.setxattr(p, "user.x", b"X"),
    tar=lambda p: tarfile.open(p, "w").close(),
    compressed=lambda p: gzip.open(p, "w").write(b"X"),
    zip=lambda p: zipfile.ZipFile(p, "w").close(),
    shelf=lambda p: shelve.open(p + ".shelf", "n").close(),
    by_descriptor=lambda p: open(f"/proc/self/fd/{os.open(p, os.O_RDONLY)}", "w").write("X"),
    process_of_python=lambda p: subprocess.run([sys.executable, "-c", f"open({p!r}, 'w').write('X')"]),
    isolated_python=lambda p: subprocess.run([sys.executable, "-I", "-c", f"open({p!r}, 'w').write('X')"]),
    system=lambda p: os.system(f"echo X > {p}"),
    removed_tree=lambda p: shutil.rmtree(p + ".tree"),
)  # fmt: skip
shell("shell_remove", "rm -f $F")
shell("shell_append", "echo X >> $F")
shell("shell_touch", "touch -d @1 $F")
shell("shell_chmod", "chmod 000 $F")
shell("shell_truncate", "truncate -s 0 $F || : > $F")
shell("shell_tree", "rm -rf $F.tree; mkdir $F.new")
shell("shell_in_place", "sed -i s/precious/X/ $F")
shell("shell_dd", "dd if=/dev/zero of=$F bs=1 count=4 conv=notrunc 2>/dev/null")
shell("shell_daemon", "setsid sh -c 'sleep 0.2; echo X > $F' & ")
shell("shell_git", "git init -q . 2>/dev/null || mkdir .git")


@way
def mapped(path: str) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:4] = b"XXXX"
        memory.flush()


@way
def sent(path: str) -> None:
    os.sendfile(os.open(path, os.O_WRONLY), os.open(__file__, os.O_RDONLY), 0, 4)


@way
def by_folder_descriptor(path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.unlink(os.path.basename(path), dir_fd=folder)


@way
def by_current_folder(path: str) -> None:
    os.chdir(os.path.dirname(path))
    with open(f"/proc/self/cwd/{os.path.basename(path)}", "w") as file:
        file.write("X")


@way
def nameless_linked(path: str) -> None:
    file = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR)
    os.write(file, b"X")
    here, follow = -100, 0x400
    ctypes.CDLL(None).linkat(here, f"/proc/self/fd/{file}".encode(), here, f"{path}.linked".encode(), follow)


@way
def punched(path: str) -> None:
    with open(path, "r+b") as file:
        ctypes.CDLL(None).fallocate(file.fileno(), 3, ctypes.c_long(0), ctypes.c_long(4))


@way
def database(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path + ".db")) as connection:
        connection.execute("delete from runs")
        connection.commit()


@way
def forked(path: str) -> None:
    if (pid := os.fork()) == 0:
        with open(path, "w") as file:
            file.write("X")
        os._exit(0)
    os.waitpid(pid, 0)


@way
def daemon(path: str) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(0.2)
            with open(path, "w") as file:
                file.write("X")
            time.sleep(600)
        os._exit(0)


@way
def spawned(path: str) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=exec, args=(f"open({path!r}, 'w').write('X')",)
    )
    process.start()
    process.join()


@way
def temporary_beside(path: str) -> None:
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        file.write(b"X")


@way
def flags(path: str) -> None:
    fcntl.ioctl(
        os.open(path, os.O_RDONLY), 0x40086602, (0x80).to_bytes(8, "little")
    )  # FS_IOC_SETFLAGS: no atime


def with_torch() -> None:
    import numpy
    import torch

    lambdas(
        torch_save=lambda p: torch.save({"a": torch.zeros(3)}, p),
        torch_jit_save=lambda p: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), p),
        torch_from_file=lambda p: torch.from_file(p, shared=True, size=4, dtype=torch.uint8).fill_(88),
        torch_storage=lambda p: torch.UntypedStorage.from_file(p, True, 4).fill_(88),
        torch_writer=lambda p: torch._C.PyTorchFileWriter(p).write_end_of_file(),
        numpy_save=lambda p: numpy.save(p, numpy.zeros(3)),
        numpy_mapped=lambda p: numpy.memmap(p, mode="r+", dtype="u1").__setitem__(slice(4), 88),
        numpy_bytes=lambda p: numpy.zeros(3).tofile(p),
    )


# ---- the files -------------------------------------------------------------------------------------------------------


def prepare(folder: str) -> None:
    with_torch()
    for name in WAYS:
        path = Path(folder, name)
        path.write_text(f"{MARK} {name}\n")
        Path(f"{path}.tree/sub").mkdir(parents=True)
        Path(f"{path}.tree/sub/file").write_text(MARK)
    with contextlib.closing(sqlite3.connect(f"{folder}/database.db")) as connection:
        connection.execute("create table runs (loss)")
        connection.execute("insert into runs values (0.123)")
        connection.commit()


def state(folder: str) -> dict[str, tuple[object, ...]]:
    """Of all that is in a folder, what a change would change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [Path(folder), *sorted(Path(folder).rglob("*"))]:
        of = path.lstat()
        content: tuple[object, ...] = ()
        if stat.S_ISREG(of.st_mode) and os.access(path, os.R_OK):
            content = (hashlib.sha256(path.read_bytes()).hexdigest(), flags_of(path))
        attributes = os.listxattr(path, follow_symlinks=False)
        found[str(path)] = (
            of.st_mode,
            of.st_uid,
            of.st_gid,
            of.st_mtime_ns,
            of.st_nlink,
            *content,
            *attributes,
        )
    return found


def flags_of(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return fcntl.ioctl(file, GET_FLAGS, bytes(8))
    except OSError as error:
        if error.errno != errno.ENOTTY:  # a file system without any
            raise
        return b""


def write_all(folder: str) -> int:
    """The number of writes that succeeded."""
    done = 0
    for name, function in WAYS.items():
        try:
            function(os.path.join(folder, name))
            done += 1
            print("did", name, file=sys.stderr)
        except Exception as error:
            print("could not", name, type(error).__name__, error, file=sys.stderr)
    return done


if __name__ == "__main__":
    with_torch()
    write_all(sys.argv[1])
