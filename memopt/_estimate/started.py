"""Processes that an estimated script starts.

Python finds the simulated device there, its writes are redirected like the script's, and its memory on a card counts. A
script that replaces itself (exec) is still estimated, with its new arguments.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memopt._estimate import protection
from memopt._estimate.request import Request, read
from memopt._run import simulated
from memopt._run.import_hook import call_after_torch, call_before_torch
from memopt.sim import _activation

if TYPE_CHECKING:
    from memopt._estimate.run import Run

_REQUEST, _SCRIPT = "MEMOPT_ESTIMATE", "MEMOPT_ESTIMATE_PROCESS"
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def announce(request: str) -> None:
    """Announce the estimate to all processes that this one, the script's, will start. request: a file's path."""
    os.environ.update(simulated.environment(_activation.active_settings(), os.environ))
    os.environ[_REQUEST], os.environ[_SCRIPT] = request, str(os.getpid())


def begin(path: str) -> None:
    """Join the estimate at the start of such a process."""
    request = read(path)
    if os.getpid() == int(os.environ[_SCRIPT]):
        script = script_of(sys.orig_argv[1:])
        if script is not None:
            sys.path.insert(0, "")  # the place of the script's folder, which Python has not taken yet
            _end_with(lambda: _go_on(replace(request, argv=script[0], module=script[1]), path))
    files = protection.redirected(request.protection_of(), str(Path(path).parent))
    call_before_torch(_activation.activate_from)
    call_after_torch(lambda: protection.saved(files))
    if not request.ranks:
        _count(request, files)


def _count(request: Request, files: protection.Files) -> None:
    """Make this process report its memory on a card; its loops are shortened as the script's are."""
    script = script_of(sys.orig_argv[1:])
    if script is not None and any(
        folder in script[0][0] for folder in ("/site-packages/", "/dist-packages/")
    ):
        return  # a library's own, as torch.compile's
    if script is not None and not script[1] and _names_torch(script[0][0]):
        sys.path.insert(0, "")
        _end_with(lambda: _run(replace(request, argv=script[0], module=False), files).execute())
    call_after_torch(lambda: _watch(_run(request, files)))
    if any("multiprocessing.spawn" in word for word in sys.orig_argv):
        import torch  # noqa: F401  # the script's functions are compiled next


def _names_torch(script: str) -> bool:
    try:
        return b"torch" in Path(script).read_bytes()
    except OSError:
        return False


def _run(request: Request, files: protection.Files) -> Run:
    from memopt._estimate.run import Run

    return Run(request, 0.0, files, main=False)


def _watch(run: Run) -> None:
    """Watch this process until it ends."""
    from memopt._estimate.script import End

    if threading.current_thread() is threading.main_thread():  # a mode is a thread's own
        run.values().__enter__()
    atexit.register(lambda: run.answer(End("end", 0)))
    os._exit = run.leaving(os._exit)  # type: ignore[assignment]


def script_of(arguments: Sequence[str]) -> tuple[list[str], bool] | None:
    """Return a Python's script or module with its arguments, and whether it is a module; None for -c and stdin."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option in _WITH_VALUE:
            rest[:1] = []
        elif option.startswith("--"):
            continue
        elif "c" in option[1:]:
            return None
        elif option.endswith("m"):
            return (rest, True) if rest else None
    return (rest, False) if rest and rest[0] != "-" else None


def _go_on(request: Request, path: str) -> int:
    from memopt._estimate import child

    return child.estimate(request, path)


def _end_with(script: Callable[[], int]) -> None:
    """End this process as the script ends."""
    status = 1
    try:
        status = script()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end: threads, then what is registered
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
