"""A script's run on the simulated device from beginning to end, and the answer that is told of it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import memopt
import memopt.sim
from memopt.estimation import coverage, loop_source, pretended_ranks, script, spread_model
from memopt.estimation.guesses import Guesses
from memopt.estimation.limits import BatchSize, TimeLimit
from memopt.estimation.loader_passes import LoaderPasses
from memopt.estimation.loops import Loops
from memopt.estimation.protection import Files
from memopt.estimation.request import Request
from memopt.estimation.script import End
from memopt.estimation.techniques import Techniques
from memopt.estimation.watch import Peaks, Requests
from memopt.profiling import recorder, recording_file
from memopt.profiling.recording import Line
from memopt.profiling.user_code import is_user_file


class Run:
    """One a process: what it puts in torch's place stays there."""

    def __init__(self, request: Request, started: float, files: Files) -> None:
        self.request = request
        self._started = started
        self._pid = os.getpid()
        self._answered = False
        if request.ranks:
            pretended_ranks.install(request.rank, request.ranks)
        if request.spread is not None:
            spread_model.install(request.spread, request.ranks)
        if request.backend == "pool":
            torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
        self._guesses = Guesses(request.fraction)
        self._peaks, self._requests, self._loops = (
            Peaks(),
            Requests(),
            Loops(request.steps, request.shorten == "none"),
        )
        self._passes = LoaderPasses(self._loops, evaluations=request.shorten == "all")
        loop_source.install(self._loops, self._guesses.asserts)
        self._batch_size = None if request.batch_size is None else BatchSize(request.batch_size)
        self._techniques = Techniques(request.techniques)
        self._recorder = recorder.start("cuda") if request.record else None
        self._files = files

    def execute(self) -> int:
        """Runs the script, writes the answer, and gives the status to exit with."""
        leave = os._exit
        os._exit = self._leaving(leave)  # type: ignore[assignment]
        seconds = self.request.seconds
        limit = None if seconds is None else TimeLimit(seconds, lambda: self._too_late(leave))
        try:
            with self._values():
                end = script.run(self.request.argv, self.request.module)
        finally:
            os._exit = leave
            if limit is not None:
                limit.end()
        self._answer(end)
        if end.error is not None and end.out_of_memory is None:
            script.show(end.error)
        return end.status

    def _values(self) -> contextlib.AbstractContextManager[object]:
        if self.request.compute:
            from memopt.estimation.computed import Computed

            return Computed()
        from memopt.estimation import values

        mode = values.Values(self._guesses)
        values.install(mode)
        return mode

    def _leaving(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """os._exit for the script; a forked worker's end is not the script's."""

        def left(status: int) -> NoReturn:
            if os.getpid() == self._pid:
                self._answer(End("exit", status))
            leave(status)

        return left

    def _too_late(self, leave: Callable[[int], NoReturn]) -> None:
        """In another thread, while the script waits somewhere and cannot be stopped."""
        self._answer(script.out_of_time())
        sys.stdout.flush()
        sys.stderr.flush()
        leave(0)

    # ---- the answer ---------------------------------------------------------------------------------------------

    def _answer(self, end: End) -> None:
        if self._answered:
            return
        self._answered = True
        with self._files.plainly():
            self._tell(end)

    def _tell(self, end: End) -> None:
        self._peaks.note()
        answer = self._figures() | self._how_it_ended(end) | self._attribution() | self._surroundings()
        answer |= coverage.told(end, self._loops, self._passes)
        answer["seconds"] = round(time.monotonic() - self._started, 3)
        answer["host_peak"] = _host_peak()
        _write(Path(self.request.answer), answer)

    def _figures(self) -> dict[str, Any]:
        devices = range(self.request.devices)
        return {
            "peak_allocated": self._peaks.allocated,
            "peak_reserved": self._peaks.reserved,
            "device_peak": max(memopt.sim.stats(device)["bytes_peak"] for device in devices),
            "retries": self._peaks.retries,
            "steps": self._loops.done,
            "guesses": self._guesses.rows(),
            "hangs_on_fraction": self._guesses.hang_on_fraction,
            "cudnn": memopt.sim.workspace_reads() > 0,
            "unmodelled": [f"{name} ({count} calls)" for name, count in memopt.sim.missing_calls().items()],
            "files_not_kept": self._files.written(),
            "techniques": self._techniques.applied,
            "loaders_of_batch_size": None if self._batch_size is None else self._batch_size.loaders,
        }

    def _how_it_ended(self, end: End) -> dict[str, Any]:
        return {
            "stopped": end.stopped,
            "exit_status": end.status,
            "error": None if end.error is None else script.described(end.error),
            "oom": None if end.out_of_memory is None else self._where_it_ran_out(end.out_of_memory),
            "failed_requests": len(self._requests.failed),
        }

    def _where_it_ran_out(self, error: torch.OutOfMemoryError) -> dict[str, Any]:
        failed = self._requests.failed[-1] if self._requests.failed else None
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if is_user_file(frame.filename) and frame.filename != __file__
        ]
        innermost = frames[-1] if frames else None
        return {
            "file": innermost and innermost.filename,
            "line": innermost and innermost.lineno,
            "text": innermost and innermost.line,
            "function": innermost and innermost.name,
            "asked": failed and failed.asked,
            "allocated": failed and failed.allocated,
            "message": str(error),
        }

    def _attribution(self) -> dict[str, Any]:
        """Whose the bytes at the peak are; without a recorder there is nothing to tell."""
        if self._recorder is None:
            return {"by_category": None, "by_line": None, "by_module": None}
        recording = self._recorder.recording()
        recording.facts["simulated"] = self._simulated()
        if self.request.recording is not None:
            recording_file.save(recording, self.request.recording)
        return {
            "by_category": recording.by_category(),
            "by_line": _rows(recording.by_line()),
            "by_module": _rows(recording.by_module()),
            "recorded_peak": recording.peak()[0],
        }

    def _surroundings(self) -> dict[str, Any]:
        return {
            "versions": {
                "memopt": memopt.__version__,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "python": platform.python_version(),
            },
            "simulated": self._simulated(),
        }

    def _simulated(self) -> dict[str, Any]:
        names = "compute_capability multiprocessors memory context cudnn_workspace fraction backend".split()
        values = "computed" if self.request.compute else "known where the script reads them, or guessed"
        return {name: getattr(self.request, name) for name in names} | {"values": values}


def _rows(lines: list[Line]) -> list[dict[str, Any]]:
    return [line._asdict() for line in lines]


def _host_peak() -> int:
    """The most bytes that this process had in memory. Not rusage's: that begins with the parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status tells no VmHWM")
    return int(found[1]) << 10


def _write(path: Path, answer: dict[str, Any]) -> None:
    """All of it or nothing: a reader may be waiting for the file."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(answer, indent=1) + "\n")
    part.replace(path)
