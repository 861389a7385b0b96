"""What a script writes comes to nothing: which way that is kept here, and how.

    overlay     by the kernel: what it and its children write goes to a scratch folder, and reads back
    landlock    by the kernel: a write anywhere else is refused; what Python writes is redirected, and reads back
    redirect    by Python alone, for what Python itself writes: not by other programs, nor by C code
    none        not at all

Devices and the network are as they are."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from memopt import _C
from memopt.estimation import kernel_compilers

_SHARED_MEMORY = "/dev/shm"


class Protection(NamedTuple):
    """way: as above. share_memory: under Landlock, whether /dev/shm may be written to: where files of this user are
    in it, they could be overwritten."""

    way: str
    share_memory: bool = True


class Unprotected(ValueError):
    """The kernel keeps no write from the user's files here."""


def find(python: str, folders: Sequence[str]) -> Protection:
    """The kernel's best way for scripts that run under that Python and write to these folders. Raises Unprotected."""
    from memopt.estimation.child_process import command

    line = command(python, __name__, json.dumps(list(folders)))
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
    if done.returncode or not done.stdout:
        raise Unprotected(f"whether the kernel protects files could not be found out: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    if "way" in found:
        return Protection(**found)
    raise Unprotected(
        "the kernel cannot keep the script's writes from your files here "
        f"(overlay: {found['overlay']}; Landlock: {found['landlock']}): --unprotected goes on with what memopt can "
        "redirect by itself, which leaves out other programs and C code; --keep-files lets the script write"
    )


# ---- in the child, before it has a second thread ---------------------------------------------------------------------


def confine(protection: Protection, folder: str) -> None:
    """This process, and all that it will start. folder: absolute, private, and removed by somebody else."""
    if protection.way == "overlay":
        _overlay(folder)
    elif protection.way == "landlock":
        _C.refuse_writes(_writable(folder, protection.share_memory))


def _overlay(folder: str) -> None:
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch)
    _C.overlay_files(scratch, [folder, *_kept()])


def _kept() -> list[str]:
    """memopt's own compiled kernels: no file of the user's, and minutes to make."""
    kept = kernel_compilers.kept()
    return [] if kept is None else [str(kept)]


def _writable(folder: str, share_memory: bool) -> list[str]:
    found = [folder, *_kept(), "/proc"]
    with os.scandir("/dev") as devices:
        found += [
            device.path for device in devices if stat.S_ISCHR(device.stat(follow_symlinks=False).st_mode)
        ]
    found += filter(os.path.isdir, ["/dev/pts", *([_SHARED_MEMORY] if share_memory else [])])
    return found


# ---- in the child, afterwards ----------------------------------------------------------------------------------------


class Files(Protocol):
    def plainly(self) -> AbstractContextManager[None]:
        """Within it this thread's files are where it says."""

    def written(self) -> list[str]:
        """The files that the script would have written, by the names that they would have."""

    def to_write(self, path: Any) -> Any:
        """The path to give to the system for writing."""


def redirected(protection: Protection, folder: str) -> Files:
    if protection.way == "none":
        return _Plain()
    if protection.way == "overlay":
        return _Overlaid(Path(folder, "scratch"))
    from memopt.estimation.scratch_files import ScratchFiles

    return ScratchFiles(folder, _kept())


def saved(files: Files) -> None:
    """Models that the script saves have holes, where its files are not kept. Imports torch."""
    if type(files) is not _Plain:
        from memopt.estimation import saved_models

        saved_models.install(files.to_write)


class _Plain:
    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        yield

    def written(self) -> list[str]:
        return []

    def to_write(self, path: Any) -> Any:
        return path


class _Overlaid(_Plain):
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def written(self) -> list[str]:
        """Of csrc/confine/confine.h's folders: the upper layers, and the root, whose files of other devices were there
        before."""
        found = [name for part in ("files", "ram/files") for name in _files_in(self._scratch / part)]
        root = self._scratch / "ram/root"
        found += _files_in(root, only_device=root.stat().st_dev)
        return sorted(found)


def _files_in(root: Path, only_device: int | None = None) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        if only_device is not None:
            folders[:] = [one for one in folders if os.lstat(os.path.join(folder, one)).st_dev == only_device]
        for name in names:
            path = os.path.join(folder, name)
            of = os.lstat(path)
            if stat.S_ISREG(of.st_mode) and only_device in (None, of.st_dev):
                found.append(path[len(str(root)) :])
    return found


# ---- the probe -------------------------------------------------------------------------------------------------------


def _probe(folders: Sequence[str]) -> dict[str, object]:
    """Each way in a child of its own, as none can be taken back."""
    refusals: dict[str, object] = {}
    shared = _files_of_this_user(_SHARED_MEMORY)
    for way in ("overlay", "landlock"):
        with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
            refusal = _tried(Protection(way), os.path.realpath(folder), folders)
        if refusal is None:
            return Protection(way, not shared)._asdict()
        refusals[way] = refusal
    return refusals


def _tried(protection: Protection, folder: str, folders: Sequence[str]) -> str | None:
    """What is against it."""
    writable = [name for name in folders if os.access(name, os.W_OK)]
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said = "it ended without a word"
        try:
            confine(protection, folder)
            for name in writable if protection.way == "overlay" else []:
                # A folder of a group that a user namespace does not know cannot be written to there.
                with tempfile.TemporaryFile(dir=name):
                    pass
            said = ""
        except (_C.Error, OSError) as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said or None


def _files_of_this_user(folder: str) -> bool:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return any(os.access(entry.path, os.W_OK) for entry in entries)
    return False


if __name__ == "__main__":
    print(json.dumps(_probe(json.loads(sys.argv[1]))))
