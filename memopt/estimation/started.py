"""Processes that an estimated script starts: Python finds the simulated device there, and what it writes is redirected
where the script's is. A script that replaces itself (exec) goes on being estimated, with its new arguments."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memopt.estimation import protection
from memopt.estimation.request import Request, read
from memopt.running import simulated
from memopt.running.torch_import import call_after_torch, call_before_torch
from memopt.sim import activation

_REQUEST, _SCRIPT = "MEMOPT_ESTIMATE", "MEMOPT_ESTIMATE_PROCESS"
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def announce(request: str) -> None:
    """To all that this process, which runs the script, will start. request: a file's path."""
    os.environ.update(simulated.environment(activation.active_settings(), os.environ))
    os.environ[_REQUEST], os.environ[_SCRIPT] = request, str(os.getpid())


def begin(path: str) -> None:
    """At the start of such a process."""
    request = read(path)
    if os.getpid() == int(os.environ[_SCRIPT]):
        script = script_of(sys.orig_argv[1:])
        if script is not None:
            _go_on(replace(request, argv=script[0], module=script[1]), path)
    files = protection.redirected(request.protection_of(), str(Path(path).parent))
    call_before_torch(activation.activate_from)
    call_after_torch(lambda: protection.saved(files))


def script_of(arguments: Sequence[str]) -> tuple[list[str], bool] | None:
    """A Python's arguments: the script or module and what is its own, and whether it is a module. None for code (-c) or
    standard input."""
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


def _go_on(request: Request, path: str) -> None:
    """Ends this process as the script ends."""
    from memopt.estimation import child

    sys.path.insert(0, "")  # the place of the script's folder, which Python has not taken yet
    status = 1
    try:
        status = child.estimate(request, path)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end: threads, then what is registered
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
