"""The write sandbox of Python: files that the script writes go to a folder that is removed afterwards.

It serves where the kernel has no overlay (protection.py). Under an estimate these files hold zeros, and must not
replace what the script saved when it trained.

Files that Python opens, creates, renames and removes are redirected (open, os, and so pathlib, shutil, numpy, logging),
and those that torch.save and safetensors write. A file that was written so is read back, and a removed one is gone, for
this script alone. Devices are left as they are. Not redirected: files that other C code opens by name, and those of
other programs that the script starts.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import glob
import io
import os
import shutil
import stat
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memopt._estimate.protection import Files

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READ = ("stat", "lstat", "statvfs", "pathconf", "access", "readlink", "chdir", "getxattr", "listxattr")
_CHANGE = ("chmod", "utime", "truncate", "setxattr")
_DEVICES = ("/dev/", "/proc/", "/sys/")


class WriteSandbox(Files):
    """The redirection of Python's writes, from now on for the life of the process.

    folder: removed by its creator. kept: folders whose files are not redirected.
    """

    def __init__(self, folder: str, kept: Sequence[str] = ()) -> None:
        folder = os.path.realpath(folder)
        self._files = os.path.join(folder, "files")
        self._gone: set[str] = set()  # files and folders that are there, but not for the script
        self._plain = threading.local()  # .on: this thread's calls are our own
        self._as_they_are = (folder, *map(os.path.realpath, kept))
        temporary = os.path.join(folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        self._install()

    def written(self) -> list[str]:
        """The files that it would have written, by the names that they would have."""
        with self.plainly():
            found = [
                os.path.join(folder, file)[len(self._files) :]
                for folder, _, files in os.walk(self._files)
                for file in files
            ]
        return sorted(found)

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Enter a context in which this thread's files are not redirected."""
        before = getattr(self._plain, "on", False)
        self._plain.on = True
        try:
            yield
        finally:
            self._plain.on = before

    # ---- where a path leads -------------------------------------------------------------------------------------

    def _absolute(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path, None for one that is not redirected."""
        if isinstance(path, int) or getattr(self._plain, "on", False):
            return None
        with self.plainly():
            name = os.fsdecode(path)
            if dir_fd is not None and not os.path.isabs(name):
                name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
            name = os.path.abspath(name)
            # Folders as they really are, or a link would lead elsewhere; the last name may be a link itself.
            name = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        if name.startswith(self._files + "/"):  # the current folder is one of ours
            return name[len(self._files) :]
        if name.startswith(_DEVICES):
            return None
        return (
            None if any(name == root or name.startswith(root + "/") for root in self._as_they_are) else name
        )

    def _copy_of(self, name: str) -> str:
        return self._files + name

    def _there(self, name: str) -> bool:
        with self.plainly():
            return os.path.lexists(name)

    def _is_folder(self, name: str) -> bool:
        with self.plainly():
            return os.path.isdir(name)

    def _real(self, name: str) -> bool:
        """Return whether the file exists on the system and the script has not removed it."""
        gone = bool(self._gone) and any(str(part) in self._gone for part in (name, *Path(name).parents))
        return not gone and self._there(name)

    def to_read(self, path: Any, dir_fd: int | None = None) -> Any:
        """The path to give to the system for reading."""
        name = self._absolute(path, dir_fd)
        if name is None:
            return path
        copy = self._copy_of(name)
        if self._there(copy):
            return copy
        # What is gone is looked for where it is not.
        return copy if not self._real(name) and self._there(name) else path

    def to_write(self, path: Any, dir_fd: int | None = None, *, keep: bool = False) -> Any:
        """Return the path to give to the system for writing; `keep`: the present content stays, and is copied first."""
        name = self._absolute(path, dir_fd)
        if name is None:
            return path
        copy, folder = self._copy_of(name), os.path.dirname(name)
        if self._real(folder) and self._is_folder(folder):
            with self.plainly():
                os.makedirs(os.path.dirname(copy), exist_ok=True)
        if keep and not self._there(copy) and self._real(name):
            with self.plainly():
                if os.path.isdir(name):
                    os.mkdir(copy)
                else:
                    shutil.copyfile(name, copy)
        return copy

    def _complete(self, folder: str) -> None:
        """Copy everything that the script sees in this folder to the scratch folder."""
        with self.plainly():
            names = os.listdir(folder)
        for name in (os.path.join(folder, each) for each in names):
            if self._real(name):
                self.to_write(name, keep=True)
                if self._is_folder(name):
                    self._complete(name)

    # ---- what is redirected -------------------------------------------------------------------------------------

    def _install(self) -> None:
        opened = self._open(io.open)
        remove, rename = self._removing(os.unlink), self._renaming
        replaced: dict[Any, dict[str, Any]] = {
            builtins: {"open": opened},
            io: {"open": opened},
            shutil: {"rmtree": self._removing(shutil.rmtree)},
            os: {
                "open": self._os_open(os.open),
                **{name: self._reading(getattr(os, name)) for name in _READ},
                **{name: self._changing(getattr(os, name)) for name in _CHANGE},
                **{name: self._linking(getattr(os, name)) for name in ("link", "symlink")},
                "mkdir": self._making(os.mkdir),
                "remove": remove,
                "unlink": remove,
                "rmdir": self._removing(os.rmdir),
                "rename": rename(os.rename),
                "replace": rename(os.replace),
                "listdir": self._listing(os.listdir),
                "scandir": self._scanning(os.scandir, os.listdir),
            },
        }
        capabilities: list[set[Any]] = [
            os.supports_dir_fd,
            os.supports_fd,
            os.supports_follow_symlinks,
            os.supports_effective_ids,
        ]
        for owner, functions in replaced.items():
            for name, function in functions.items():
                for capable in capabilities:
                    if getattr(owner, name) in capable:
                        capable.add(function)
                setattr(owner, name, function)
        self._install_globber()

    @staticmethod
    def _install_globber() -> None:
        """The class by which pathlib looks in folders since CPython 3.13 binds functions of os when it is made. One
        that it wraps in a function of its own, as scandir since 3.14, asks os when it is called."""
        globber = getattr(glob, "_StringGlobber", None)
        for name in ("lstat", "scandir"):
            if isinstance(getattr(globber, name, None), types.BuiltinFunctionType):
                setattr(globber, name, staticmethod(getattr(os, name)))

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax+"):
                if "x" in mode and self._there(self.to_read(file)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
                file = self.to_write(file, keep="w" not in mode)
            else:
                file = self.to_read(file)
            return original(file, mode, *args, **kwargs)

        return open_

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & _WRITES and not flags & os.O_TMPFILE & ~os.O_DIRECTORY:
                if flags & os.O_EXCL and flags & os.O_CREAT and self._there(self.to_read(path, dir_fd)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                there = not flags & os.O_CREAT  # or it is to fail, as it would for real
                target = self.to_write(path, dir_fd, keep=there or not flags & os.O_TRUNC)
            else:
                target = self.to_read(path, dir_fd)
            return original(target, flags, mode, dir_fd=dir_fd)

        return open_

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            target = self.to_read(path, dir_fd)
            return original(target, *args, **_fd(target, path, dir_fd), **kwargs)

        return read

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            target = self.to_write(path, dir_fd, keep=True)
            return original(target, *args, **_fd(target, path, dir_fd), **kwargs)

        return change

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            name = self._absolute(path, dir_fd)
            if name is None:
                return original(path, mode, dir_fd=dir_fd)
            if self._real(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return original(self.to_write(path, dir_fd), mode)

        return make

    def _removing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Replace unlink, rmdir and rmtree: what the script wrote is removed, what was there before is hidden from it
        alone."""

        @functools.wraps(original)
        def remove(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            name = self._absolute(path, dir_fd)
            if name is None:
                return original(path, *args, dir_fd=dir_fd, **kwargs)
            copy, real = self._copy_of(name), self._real(name)
            if self._there(copy) or not real:
                with self.plainly():
                    original(copy, *args, **kwargs)
            if real:
                self._gone.add(name)
            return None

        return remove

    def _renaming(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def rename(
            source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            name = self._absolute(source, src_dir_fd)
            into = self.to_write(target, dst_dir_fd)
            if name is None:
                return original(source, into, src_dir_fd=src_dir_fd)
            copy, real = self._copy_of(name), self._real(name)
            if real:  # what is there stays, and its like is renamed
                self.to_write(name, keep=True)
                if self._is_folder(name):
                    self._complete(name)
            original(copy, into)
            if real:
                self._gone.add(name)
            return None

        return rename

    def _linking(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            original(self.to_read(source), self.to_write(target), *args, **kwargs)

        return link

    def _names(self, path: Any, list_: Callable[[Any], list[Any]]) -> list[Any] | None:
        """Return a folder's entries as the script sees them, None where they are the system's."""
        name = self._absolute("." if path is None else path)
        if name is None or (not self._there(self._copy_of(name)) and not self._gone):
            return None
        copy = self._copy_of(name)
        found: set[str] = set()
        if self._real(name):
            theirs = (os.fsdecode(each) for each in list_(name))
            found.update(each for each in theirs if os.path.join(name, each) not in self._gone)
        if self._there(copy) or not self._real(name):
            found.update(list_(copy))
        names = sorted(found)
        return [os.fsencode(each) for each in names] if isinstance(path, bytes) else names

    def _listing(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @functools.wraps(original)
        def list_(path: Any = None) -> list[Any]:
            names = None if isinstance(path, int) else self._names(path, original)
            return original(path) if names is None else names

        return list_

    def _scanning(self, original: Callable[..., Any], list_: Callable[..., list[Any]]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scan(path: Any = None) -> Any:
            names = None if isinstance(path, int) else self._names(path, list_)
            return (
                original(path) if names is None else _Entries(os.fspath("." if path is None else path), names)
            )

        return scan


def _fd(target: Any, path: Any, dir_fd: int | None) -> dict[str, int]:
    """A path that was redirected is absolute; another is still to be seen from the folder given."""
    return {"dir_fd": dir_fd} if dir_fd is not None and target is path else {}


class _MergedDirEntry:
    """An os.DirEntry of a folder that is in two places."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self.stat(follow_symlinks=follow_symlinks).st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self.stat(follow_symlinks=follow_symlinks).st_mode)

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.stat(follow_symlinks=False).st_mode)

    def is_junction(self) -> bool:
        return False


class _Entries:
    def __init__(self, folder: Any, names: list[Any]) -> None:
        self._entries = iter([_MergedDirEntry(folder, name) for name in names])

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _MergedDirEntry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter([])
