"""Protection of the user's files from a script's writes, and the end of the processes that it leaves.

Files are protected in one of these ways:

    overlay     by the kernel: writes of the process and its children go to a scratch folder, and can be read back
    landlock    by the kernel: writes elsewhere are refused; Python's own are redirected, and can be read back
    redirect    by Python alone, for Python's own writes: not those of other programs or of C code
    none        no protection

Devices and the network are not protected.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memopt import _C
from memopt._runtime import process
from memopt._runtime.kernels import user_cache

_SHARED_MEMORY = "/dev/shm"


class Protection(NamedTuple):
    """A way of protection, as above.

    share_memory: under Landlock, whether /dev/shm may be written to, where this user's files could be overwritten.
    """

    way: str
    share_memory: bool = True

    def denied_memory(self) -> str:
        """Return why a script may not share memory between its processes, and the remedy; nothing if it may."""
        if self.way != "landlock" or self.share_memory:
            return ""
        names = sorted(os.listdir(_SHARED_MEMORY))
        listed = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
        return (
            f"{_SHARED_MEMORY} has files that the script could overwrite ({listed}), so it may not use shared memory: "
            f"remove those that no process needs, or let the script write with --keep-files"
        )


class Unprotected(ValueError):
    """The kernel keeps no write from the user's files here; what to do about it depends on who asks."""


def find(python: str, folders: Sequence[str]) -> Protection:
    """The kernel's best way for scripts that run under that Python and write to these folders. Raises Unprotected."""
    found = _asked(python, tuple(folders))
    return found._replace(share_memory=not _files_of_this_user(_SHARED_MEMORY))


@functools.lru_cache  # it takes a second, and a kernel stays what it is
def _asked(python: str, folders: tuple[str, ...]) -> Protection:
    try:
        # This process's, because an interrupt kills the one that is asked.
        with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as home:
            found = process.ask(__name__, [home, *folders], python=python, seconds=600).what
    except process.ChildFailed as error:
        raise Unprotected(f"the test of the kernel's file protection failed: {error}") from None
    if "way" in found:
        return Protection(**found)
    raise Unprotected(
        "the kernel cannot protect your files from its writes here "
        f"(overlay: {found['overlay']}; Landlock: {found['landlock']})"
    )


GOES_ON = "redirects Python's writes only, not those of other programs and C code"


# ---- in the child, before it has a second thread ---------------------------------------------------------------------


def confine(protection: Protection, folder: str) -> None:
    """Confine this process and all that it will start. folder: absolute, private, and removed by the caller."""
    if protection.way == "overlay":
        _overlay(folder)
    elif protection.way == "landlock":
        _C.refuse_writes(_writable(folder, protection.share_memory))


def _overlay(folder: str) -> None:
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch)
    _C.overlay_files(scratch, [folder, *_kept()])


def kept_kernels() -> Path | None:
    """The folder in which compiled files are kept from run to run; made. None for a user without a cache
    that may be written to."""
    cache = user_cache()
    if cache is None:
        return None
    folder = Path(cache, "memopt", "simulated")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # each run compiles anew
        return None
    return folder


def _kept() -> list[str]:
    kept = kept_kernels()
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


def reopen(protection: Protection, opened: dict[int, str], folder: str) -> None:
    """Reopen files that this process had open for writing before it was confined, which protects none of them.

    They become the files that lie under their names now, or copies.
    """
    for descriptor, path in opened.items() if protection.way != "none" else ():
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        place, kept = os.lseek(descriptor, 0, os.SEEK_CUR), os.get_inheritable(descriptor)
        if protection.way in ("landlock", "redirect"):
            path = shutil.copyfile(path, os.path.join(folder, f"opened-{descriptor}"))
        again = os.open(path, mode & (os.O_ACCMODE | os.O_APPEND | os.O_SYNC))
        os.lseek(again, place, os.SEEK_SET)
        os.dup2(again, descriptor, kept)
        os.close(again)


def open_for_writing() -> dict[int, str]:
    """Return this process's named files that are open for writing, without its standard output."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own, which is closed; a file that has been removed
            writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            of = os.fstat(descriptor)
            if descriptor > 2 and writes and stat.S_ISREG(of.st_mode) and os.path.samestat(of, os.stat(path)):
                found[descriptor] = path
    return found


class Files:
    """The files that a script writes: its own, where nothing protects them."""

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Enter a context in which this thread's files are not redirected."""
        yield

    def written(self) -> list[str]:
        """Return the files that the script would have written, by the names that they would have."""
        return []

    def to_write(self, path: Any) -> Any:
        """Return the path to give to the system for writing."""
        return path


def redirected(protection: Protection, folder: str) -> Files:
    if protection.way == "none":
        return Files()
    if protection.way == "overlay":
        return _Overlaid(Path(folder, "scratch"))
    from memopt._estimate.write_sandbox import WriteSandbox

    return WriteSandbox(folder, _kept())


def saved(files: Files) -> None:
    """Make models that the script saves have holes, if its files are not kept. Imports torch."""
    if type(files) is not Files:
        from memopt._estimate import saved_models

        saved_models.install(files.to_write)


class _Overlaid(Files):
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def written(self) -> list[str]:
        """Return the files in the folders of csrc/confine/confine.h.

        These are the upper layers, and the root, whose files on other devices were there before.
        """
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


# ---- processes that are left -----------------------------------------------------------------------------------------


class _EndAsked(BaseException):
    """Raised when this process is told to end."""


def fork_watched(fork: Callable[[], int] = os.fork) -> None:
    """Continue in a forked child; this process watches it (fork_and_watch) and ends with its status."""
    if (status := fork_and_watch(fork)) is not None:
        _end_as(status)


def fork_and_watch(fork: Callable[[], int] = os.fork) -> int | None:
    """Fork. Return None in the child; in this process its wait status, once it and all that it has left behind have
    ended.

    Told to end (SIGTERM), or left by its own parent, this process ends all of them and itself.
    """
    parent = os.getppid()
    _C.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_asked)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return None
    asked = False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, pid, options) is None and os.getppid() == parent:
            time.sleep(0.02)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    except _EndAsked:
        asked = True
    status = _end_all(pid)
    if asked or os.getppid() != parent:
        _end_as(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return status


def _end_asked(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends all of it: who asks again need not stop that
    raise _EndAsked


def _end_all(pid: int) -> int:
    """Kill all descendants and return the status of `pid`.

    A killed process leaves its children to this one, so it repeats until there are none, or none that this user may
    end.
    """
    status, beyond = 0, set[int]()
    while children := _children() - beyond:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:
                beyond.add(child)
        for child in children - beyond:
            _, ended = os.waitpid(child, 0)
            if child == pid:
                status = ended
    return status


def _children() -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if parent == os.getpid():
                found.add(int(name))
    return found


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:  # which nobody can set
            signal.signal(ended_by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [ended_by])
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


# ---- the probe -------------------------------------------------------------------------------------------------------


def _probe(home: str, folders: Sequence[str]) -> dict[str, object]:
    """Try each way in a child of its own, because none can be undone. home: for what they write."""
    refusals: dict[str, object] = {}
    for way in ("overlay", "landlock"):
        with tempfile.TemporaryDirectory(dir=home) as folder:
            refusal = _tried(Protection(way), os.path.realpath(folder), folders)
        if refusal is None:
            return Protection(way)._asdict()
        refusals[way] = refusal
    return refusals


def _tried(protection: Protection, folder: str, folders: Sequence[str]) -> str | None:
    """Try the protection in a forked child and return the reason why it fails, None if it works."""
    writable = [name for name in folders if os.access(name, os.W_OK)]
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said = "it ended without a message"
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
    home, *folders = next(process.requests())
    process.tell("found", **_probe(home, folders))
