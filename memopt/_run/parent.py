"""The process that starts the script's, watches its memory from outside, and is still there when it is killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memopt import _C
from memopt._run import merged_report
from memopt._run.live_view import LiveView
from memopt._run.plan import allocator_environment
from memopt._run.ranks_folder import Place, RanksFolder
from memopt._run.run_child import RunRequest
from memopt._runtime.host_memory import Limit, descendants, limit_of, resident_bytes
from memopt._runtime.process import quiet_environment
from memopt._runtime.table import counted, folded_lines, line_width
from memopt._runtime.terminal_line import is_terminal

_WATCHED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
_FROM_THE_TERMINAL = 0x80  # si_code SI_KERNEL: the child, in the same group, has had it too
# Of the time that torchrun gives its ranks, 30 s, so that there is some left to tell.
_PATIENCE = 20.0
_SECOND_LINE = 30.0  # seconds after which a simulated run is spoken of again
_START = "from memopt._run.run_child import main; main()"


def run(request: RunRequest, quiet: bool, python: str = sys.executable, noise: bool = True) -> int:
    """Run the request with `python`, report on standard error, and return the script's exit code, or 128 plus the
    signal's number, as a shell does. noise: whether to show what libraries print when a simulated run imports them."""
    place = Place.of(os.environ)
    ranks = None
    if place is not None:
        ranks = RanksFolder(request.output or f"memopt-{request.name}.{place.job}", place)
        ranks.begin()
        request = replace(request, output=ranks.recording, live=request.live and place.rank == 0)
    if request.live and not is_terminal():
        _say("memopt run: --live needs a terminal on standard error: the script runs without it")
        request = replace(request, live=False)
    with tempfile.TemporaryDirectory(prefix="memopt-run-") as folder:
        request = replace(request, folder=folder)
        before = limit_of()
        # Blocked before there is a child, so that none is lost; the child unblocks them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            begun = time.monotonic()
            progress = _Progress(request, quiet or (place is not None and place.rank > 0))
            patience = None if ranks is None else _PATIENCE
            with LiveView(folder) if request.live else contextlib.nullcontext() as view:
                streams = view.streams if view else {}
                child = subprocess.Popen(
                    _command(request, python), env=_environment(request, noise), **streams
                )
                curve = MemoryCurve(child.pid)
                if view:
                    view.begin(curve)
                ended_from_outside = _watch(child, curve, patience, progress)
            seconds = time.monotonic() - begun
            end = _End(request, child.pid, child.returncode, seconds, curve, before, ended_from_outside)
            if ranks is not None:
                outcome = _outcome(end)
                if ranks.end(outcome, wait=ended_from_outside):
                    if not quiet:
                        merged_report.tell(ranks.path, _say)
                elif child.returncode != 0 and not ended_from_outside:
                    _say(merged_report.first_words(outcome, ranks.place))
                # torchrun ends ranks when one fails: this one has ended, and its status stays what it was.
                while signal.sigtimedwait({signal.SIGTERM}, 0) is not None:
                    pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ranks is None and (not quiet or end.status < 0):
            sys.stdout.flush()
            _say(_said(end, quiet))
        return end.status if end.status >= 0 else 128 - end.status


@dataclass(frozen=True)
class _End:
    """The end of a script. before: the limit of host memory at its start; asked: it was told from outside to end."""

    request: RunRequest
    pid: int
    status: int
    seconds: float
    curve: MemoryCurve
    before: Limit
    asked: bool

    def left(self, name: str) -> str:
        """Return what the child has written to a file of its folder, "" where it has not."""
        file = Path(self.request.folder) / name
        return file.read_text() if file.exists() else ""


def _command(request: RunRequest, python: str) -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [python, *flags, "-c", _START, request.to_json()]


def _environment(request: RunRequest, noise: bool) -> dict[str, str]:
    """Return the child's environment."""
    before: Mapping[str, str] = os.environ
    if request.simulated is not None:
        from memopt._run import simulated

        before = simulated.environment(request.simulated, before if noise else quiet_environment(before))
    return allocator_environment(request.plan.backend if request.plan else "", before)


class _Progress:
    """The progress of a simulated run, which takes longer than one on a device: lines on standard error, because the
    script's own output goes to the same terminal. They report the start, the end of the first step, and after that, on
    a terminal, the progress at ever longer intervals."""

    def __init__(self, request: RunRequest, quiet: bool) -> None:
        self._file, self._begun = Path(request.folder) / "progress.json", time.monotonic()
        self._next = math.inf if quiet or request.simulated is None else 0.0
        if self._next == 0.0:
            settings = dict(part.split("=") for part in (request.simulated or "").split())
            card = _C.format_size(int(settings["memory"]))
            self._say(
                f"{request.argv[0]} on a simulated card of {card}, computed by this machine's processors"
            )
        if request.live:  # its line tells more
            self._next = math.inf

    def look(self) -> None:
        seconds = time.monotonic() - self._begun
        if seconds < self._next or not self._file.exists():
            return
        told = json.loads(self._file.read_text())
        steps, peak = told["steps"], told.get("peak_allocated", 0)
        done = "its first optimizer step is" if steps == 1 else f"{steps} optimizer steps are"
        self._say(f"{done} done after {seconds:.1f} s, at most {_C.format_size(peak)} allocated")
        self._next = max(_SECOND_LINE, 2 * seconds) if sys.stderr.isatty() else math.inf

    def _say(self, text: str) -> None:
        _say("\n".join(_folded([f"memopt run: {text}"], line_width(sys.__stderr__))))


def _watch(
    child: subprocess.Popen[bytes], curve: MemoryCurve, patience: float | None, progress: _Progress
) -> bool:
    """Watch the child; return whether this process was told from outside to end.

    patience: seconds that the child may take then."""
    until = math.inf
    while True:
        curve.sample()
        progress.look()
        told = signal.sigtimedwait(_WATCHED, curve.interval)
        if told is not None and told.si_signo != signal.SIGCHLD and told.si_code != _FROM_THE_TERMINAL:
            child.send_signal(told.si_signo)
            if patience is not None:
                until = min(until, time.monotonic() + patience)
        if child.poll() is not None:
            return until < math.inf
        if time.monotonic() > until:
            child.kill()


def _said(end: _End, quiet: bool) -> str:
    size = _C.format_size
    name = f"memopt run: {' '.join(end.request.argv[:1])} (pid {end.pid})"
    after = f"after {end.seconds:.1f} s"
    if end.request.simulated is not None and end.status == -signal.SIGINT:
        _, recorded, where = end.left("summary.txt").rpartition("recorded in ")
        return f"{name} was interrupted {after}" + (
            f"; {recorded}{' '.join(where.split())}" if recorded else ""
        )
    lines, width = [f"{name} {_ended(end.status)} {after}"], line_width(sys.__stderr__)
    curve = end.curve
    if curve.samples:
        begin = f"  host memory, at most {size(curve.peak)}: "
        last = f" {size(curve.samples[-1].total)} at the end"
        room = width - len(begin) - len(last)
        lines.append(f"{begin}{curve.bars(max(1, min(_BAR_COUNT, room)))}{last}")
    if end.status < 0:
        lines += _of_a_signal(end)
    lines = _folded(lines, width)
    if not quiet:
        lines += [
            line
            for file in ("fit.txt", "failure.txt", "summary.txt")
            for line in end.left(file).rstrip("\n").splitlines()
        ]
    return "\n".join(lines)


def _folded(lines: list[str], width: int) -> list[str]:
    return [part for line in lines for part in folded_lines(line, width, further="    ")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _outcome(end: _End) -> dict[str, Any]:
    """Return the outcome of one rank among several."""
    figures, progress = end.left("figures.json"), end.left("progress.json")
    return {
        "program": " ".join((["-m"] if end.request.module else []) + end.request.argv),
        "pid": end.pid,
        "status": end.status,
        "ended": _ended(end.status),
        "seconds": round(end.seconds, 3),
        "host_peak": end.curve.peak,
        "of_a_signal": _of_a_signal(end) if end.status < 0 else [],
        "plan": end.left("fit.txt").splitlines(),
        "failure": end.left("failure.txt").strip(),
        "was_at": _was_at(end.left("stack.txt")),
        "figures": json.loads(figures) if figures else None,
        "progress": json.loads(progress) if progress else None,
    }


def _was_at(stack: str) -> list[str]:
    """Return the lines that were running when the end came from outside, innermost first, without memopt's and
    torch's."""
    first, _, _ = stack[1:].partition("Current thread")  # each time that it was asked there is one
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', first)
    ours = str(Path(__file__).resolve().parents[1])
    return [
        f"{Path(file).name}:{line} in {function}"
        for file, line, function in frames
        if not file.startswith((ours, "<")) and f"{os.sep}site-packages{os.sep}" not in file
    ]


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with {status}"
    try:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was ended by signal {-status}"


def _of_a_signal(end: _End) -> list[str]:
    number, curve, before = -end.status, end.curve, end.before
    lines = []
    size = _C.format_size
    if number == signal.SIGKILL and end.asked:
        lines.append(f"  it did not end within {_PATIENCE:g} s of being asked to, and was then killed")
    elif number == signal.SIGKILL:
        now = limit_of()
        of = f"{size(now.size)}, {now.where}" if now.size else "not known"
        killed = (now.kills or 0) - (before.kills or 0)
        if killed > 0:
            why = f"the kernel's out-of-memory killer has acted there ({killed} times)"
        elif now.kills is None:
            why = "whether the kernel's out-of-memory killer acted cannot be seen from here"
        else:
            why = "no out-of-memory kill is counted there, so another process sent the signal"
        lines.append(f"  limit of host memory: {of}: {why}")
        for pid, name, grown, rate in curve.growth()[:3]:
            who = "the script itself" if pid == curve.pid else name
            lines.append(
                f"  grew: pid {pid} ({who}) by {size(grown)}, {size(round(rate))} a second at the end"
            )
    text = end.left("progress.json")
    if text:
        told = json.loads(text)
        device = f", {size(told['allocated'])} allocated on the device" if "allocated" in told else ""
        stepped = counted(told["steps"], "optimizer step")
        lines.append(f"  last seen after {stepped}, {told['seconds']:.1f} s{device}")
    if number == signal.SIGKILL:
        lines.append("  no recording: it was in the memory of the process that was killed")
    return lines


# ---- host memory -----------------------------------------------------------------------------------------------------


_BARS = "▁▂▃▄▅▆▇█"
_BAR_COUNT = 32
_MOST = 512  # samples; then every second one goes, and they are taken half as often


@dataclass(frozen=True)
class Sample:
    """Resident bytes by process; pages that processes share count in each."""

    time: float
    resident: dict[int, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values())


@dataclass
class MemoryCurve:
    pid: int
    interval: float = 0.1  # seconds
    samples: list[Sample] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    peak: int = 0

    def sample(self) -> None:
        """Take a sample if the last one is old enough; none once the process has ended."""
        now = time.monotonic()
        if self.samples and now - self.samples[-1].time < self.interval:
            return
        resident = {pid: size for pid in (self.pid, *descendants(self.pid)) if (size := _resident(pid))}
        if self.pid not in resident:
            return
        for pid in resident:
            self.names[pid] = self.names.get(pid) or _name(pid)  # a process has none before it has begun
        self.samples.append(Sample(now, resident))
        self.peak = max(self.peak, self.samples[-1].total)
        if len(self.samples) > _MOST:
            del self.samples[::2]
            self.interval *= 2

    def bars(self, width: int = _BAR_COUNT) -> str:
        """Return the curve as text, one character for the maximum of each interval."""
        totals = [sample.total for sample in self.samples]
        if not totals:
            return ""
        step = max(1, -(-len(totals) // width))
        most = [max(totals[n : n + step]) for n in range(0, len(totals), step)]
        return "".join(_BARS[min(7, 8 * total // (max(most) + 1))] for total in most)

    def growth(self) -> list[tuple[int, str, int, float]]:
        """Return processes that grew over the last part of the curve, fastest first: pid, name, bytes, bytes a
        second."""
        if len(self.samples) < 2:
            return []
        last = self.samples[-1]
        first = next(
            s for s in self.samples if s.time >= last.time - max(1.0, (last.time - self.samples[0].time) / 4)
        )
        first = first if first is not last else self.samples[-2]
        seconds = last.time - first.time
        grown = [
            (
                pid,
                self.names[pid],
                size - first.resident.get(pid, 0),
                (size - first.resident.get(pid, 0)) / seconds,
            )
            for pid, size in last.resident.items()
        ]
        return sorted((one for one in grown if one[2] > 0), key=lambda one: -one[2])


def _resident(pid: int) -> int:
    try:
        return resident_bytes(pid)
    except OSError:  # it has just ended
        return 0


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return Path(words[0].decode(errors="replace")).name
    except OSError:
        return "?"
