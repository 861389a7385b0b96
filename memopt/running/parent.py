"""The process that starts the script's, watches its memory from outside, and is still there when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from memopt import _C
from memopt.running.host_memory_limits import Limit, limit_of
from memopt.running.memory_curve import MemoryCurve
from memopt.running.request import Request

_WATCHED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
_FROM_THE_TERMINAL = 0x80  # si_code SI_KERNEL: the child, in the same group, has had it too
_START = "from memopt.running.child import main; main()"


def run(request: Request, quiet: bool) -> int:
    """Runs it to its end, says on standard error what was seen, and returns the script's exit code; of one that a
    signal ended, 128 and the signal's number, as a shell gives it."""
    with tempfile.TemporaryDirectory(prefix="memopt-run-") as folder:
        request = replace(request, folder=folder)
        before = limit_of()
        # Blocked before there is a child, so that none is lost; the child unblocks them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            begun = time.monotonic()
            child = subprocess.Popen(_command(request))
            curve = MemoryCurve(child.pid)
            _watch(child, curve)
            seconds = time.monotonic() - begun
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = child.returncode
        if not quiet or status < 0:
            sys.stdout.flush()
            print(
                _said(request, child.pid, status, seconds, curve, before, quiet),
                file=sys.stderr,
                end="",
                flush=True,
            )
        return status if status >= 0 else 128 - status


def _command(request: Request) -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [sys.executable, *flags, "-c", _START, request.to_json()]


def _watch(child: subprocess.Popen[bytes], curve: MemoryCurve) -> None:
    while True:
        curve.sample()
        told = signal.sigtimedwait(_WATCHED, curve.interval)
        if told is not None and told.si_signo != signal.SIGCHLD and told.si_code != _FROM_THE_TERMINAL:
            child.send_signal(told.si_signo)
        if child.poll() is not None:
            return


def _said(
    request: Request, pid: int, status: int, seconds: float, curve: MemoryCurve, before: Limit, quiet: bool
) -> str:
    size = _C.format_size
    name = " ".join(request.argv[:1])
    lines = [f"memopt run: {name} (pid {pid}) {_ended(status)} after {seconds:.1f} s"]
    if curve.samples:
        lines.append(
            f"  host memory, at most {size(curve.peak)}: {curve.bars()} {size(curve.samples[-1].total)} at the end"
        )
    if status < 0:
        lines += _of_a_signal(-status, curve, before, Path(request.folder))
    for file in ("failure.txt", "summary.txt"):
        text = _read(Path(request.folder) / file)
        if text and not quiet:
            lines += text.rstrip("\n").splitlines()
    return "\n".join(lines) + "\n"


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with {status}"
    try:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was ended by signal {-status}"


def _of_a_signal(number: int, curve: MemoryCurve, before: Limit, folder: Path) -> list[str]:
    lines = []
    size = _C.format_size
    if number == signal.SIGKILL:
        now = limit_of()
        of = f"{size(now.size)}, {now.where}" if now.size else "not known"
        killed = (now.kills or 0) - (before.kills or 0)
        if killed > 0:
            why = f"the kernel's out-of-memory killer has struck there ({killed} times)"
        elif now.kills is None:
            why = "whether the kernel's out-of-memory killer struck is not to be seen from here"
        else:
            why = "no kill for want of memory is counted there, so somebody sent the signal"
        lines.append(f"  limit of host memory: {of}: {why}")
        for pid, name, grown, rate in curve.growth()[:3]:
            who = "the script itself" if pid == curve.pid else name
            lines.append(
                f"  who grew: pid {pid} ({who}) by {size(grown)}, {size(round(rate))} a second at the end"
            )
    text = _read(folder / "progress.json")
    if text:
        told = json.loads(text)
        device = f", {size(told['allocated'])} allocated on the device" if "allocated" in told else ""
        lines.append(
            f"  last heard of after {told['steps']} optimizer steps, {told['seconds']:.1f} s{device}"
        )
    if number == signal.SIGKILL:
        lines.append("  no recording: it lived in the process that was killed")
    return lines


def _read(file: Path) -> str:
    return file.read_text() if os.path.exists(file) else ""
