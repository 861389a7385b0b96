"""A script's run on the simulated device from beginning to end, and the answer that reports it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

import memopt
import memopt.sim
from memopt import _C
from memopt._estimate import fake_ranks, loop_source, moments, script, values
from memopt._estimate.answer import file_of_this_process, seconds_since_boot, start_since_boot
from memopt._estimate.cards import RATES
from memopt._estimate.host_reads import Guesses
from memopt._estimate.kept import Kept
from memopt._estimate.loader_passes import LoaderPasses
from memopt._estimate.loops import Loops
from memopt._estimate.protection import Files
from memopt._estimate.request import Request
from memopt._estimate.roofline_clock import RooflineClock
from memopt._estimate.script import BatchSizeOverride, End, Requests, Stopped, TimeLimit
from memopt._estimate.step_trace import StepTrace
from memopt._memory.recording import recorder, recording_file
from memopt._memory.recording.recording import Line, Recording
from memopt._memory.recording.user_code import is_user_file
from memopt._run.peaks import Peaks
from memopt._run.plan import PLANNING
from memopt._run.techniques import Techniques, trained_bytes
from memopt._runtime import device_clock
from memopt._runtime.host_memory import peak_resident_bytes
from memopt.sim import _activation

_MOST_OF = 0.9  # of the peak, that a recording which has it shows; the allocator rounds up
_LINES = 3  # that hold most before training begins
_BEGINS = "begins"  # a mark: training does
_TELLS = 0.25  # seconds between what a process that the script has started says of itself
# Of torch: what trains without gradients being recorded.
_TRAINING = tuple(
    str(Path(torch.__file__).parent / name) for name in ("autograd", "optim", "utils/checkpoint.py")
)


class Run:
    """The run of a script, one for each process: its patches of torch stay.

    main: False in a process that the script has started. Its answer is a file of answer.py's, and a process that
    uses no card has none.
    """

    def __init__(self, request: Request, started: float, files: Files, main: bool = True) -> None:
        self.request, self._main, self._started = request, main, started
        self._pid, self._answered = os.getpid(), False
        self._since: float | None = None  # this process has used a card
        if request.ranks:
            fake_ranks.install_fake_groups(request.rank, request.ranks)
        if request.spread is not None:
            fake_ranks.parallelize(request.spread, request.ranks)
        if request.backend == "pool":
            torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
        self._guesses = Guesses(request.fraction)
        self._values: values.Values | None = None
        self._peaks, self._requests = Peaks(), Requests()
        self._loops = Loops(request.steps, request.shorten == "none", request.shorten == "all", self._stepped)
        self._step, self._trained_bytes, folder = None, 0, Path(request.answer).parent
        if request.timed:
            self._step = StepTrace(folder, lambda: bool(self._loops.last))
        watched = (request.timed or request.record) and not request.techniques
        self._kept = Kept(self._begins) if watched else None
        if request.rates_of and not request.compute:
            interrupt = self._step.interrupt if self._step is not None else lambda: None
            device_clock.use(RooflineClock(folder, RATES[request.rates_of], interrupt, files.plainly))
        self._passes = LoaderPasses(self._loops, evaluations=request.shorten == "all")
        loop_source.install(self._loops, self._guesses.asserts)
        self._batch_size = None if request.batch_size is None else BatchSizeOverride(request.batch_size)
        self._recorder = self._start_recorder() if request.record else None
        self._techniques = Techniques(request.techniques, self._plans, request.keeps, request.host_memory)
        self._files = files
        self._answering = threading.RLock()
        if not main:
            self._of_this_process()
        torch.cuda._lazy_call(self._on_card)
        if not request.ranks:
            os.register_at_fork(after_in_child=self._forked)
            self._watch_processes()
            if torch.distributed.is_available():
                fake_ranks.install_in_started(lambda: not self._main)
        if not request.compute:
            _share_tensors()

    def _start_recorder(self) -> recorder.Recorder:
        return recorder.start("cuda", max_events=self.request.events)

    def _plans(self, kind: str) -> None:
        self._peaks.leave_out_planning(kind == PLANNING)
        if self._recorder is not None:
            self._recorder.mark(kind)

    def _begins(self) -> None:
        if self._recorder is not None:
            self._recorder.mark(_BEGINS)

    def _stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and not self._trained_bytes:
            self._trained_bytes = trained_bytes(optimizer)
        if self._kept is not None:
            self._kept.stepped(optimizer)
        if self._step is not None:
            with self._files.plainly():
                self._step.stepped(optimizer)

    def execute(self) -> int:
        """Run the script, write the answer, and return the exit status."""
        leave = os._exit
        os._exit = self.leaving(leave)  # type: ignore[assignment]
        seconds = self.request.seconds
        limit = None if seconds is None else TimeLimit(seconds, lambda: self._too_late(leave))
        try:
            with self.values():
                end = script.run(self.request.argv, self.request.module)
        finally:
            os._exit = leave
            if limit is not None:
                limit.end()
        self.answer(end)
        if end.error is not None and end.out_of_memory is None:
            script.show(end.error)
        return end.status

    def values(self) -> contextlib.AbstractContextManager[object]:
        if self.request.compute:
            return values.Computed()
        self._values = values.Values(self._guesses)
        values.install(self._values)
        return self._values

    def _made_on_host(self) -> int:
        return 0 if self._values is None else self._values.host.peak

    def leaving(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """Replace os._exit, which ends the script; the end of a worker that it forks is not the script's."""

        def left(status: int) -> NoReturn:
            if os.getpid() == self._pid:
                self.answer(End("exit", status))
            leave(status)

        return left

    def _too_late(self, leave: Callable[[int], NoReturn]) -> None:
        """End the process from another thread, while the script waits somewhere and cannot be stopped."""
        self.answer(script.out_of_time())
        sys.stdout.flush()
        sys.stderr.flush()
        leave(0)

    # ---- processes that the script starts ----------------------------------------------------------------------

    def _of_this_process(self) -> None:
        self._pid, self._answered, self._since = os.getpid(), False, None
        self._started = time.monotonic()
        self.request = replace(
            self.request,
            answer=file_of_this_process(self.request.answer),
            recording=None,
            seconds=None,
        )

    def _forked(self) -> None:
        """Begin anew in a forked child, which has the patches of torch too."""
        self._main = False
        self._answering = threading.RLock()
        self._guesses.forget()
        self._of_this_process()
        if self._recorder is not None and not torch.cuda._initialized:
            self._recorder = self._start_recorder()  # the other does not follow

    def _watch_processes(self) -> None:
        """Watch multiprocessing's processes, at their end."""
        original = BaseProcess.run

        @functools.wraps(original)
        def run(process: BaseProcess) -> None:
            end = End("end", 0)
            try:
                original(process)
            except Stopped as stopped:
                end = script.ended_by(stopped)
            except BaseException as error:
                end = script.ended_by(error)
                if isinstance(error, SystemExit) and end.out_of_memory is None:
                    end = End("exit", 0)  # its status is its parent's business
                raise
            finally:
                self.answer(end)

        BaseProcess.run = run  # type: ignore[method-assign, assignment]

    def _on_card(self) -> None:
        self._since = seconds_since_boot() if self._main else start_since_boot()
        if not self._main:
            threading.Thread(target=self._keep_telling, daemon=True).start()

    def _keep_telling(self) -> None:
        while not self._answered:
            with self._answering:
                if not self._answered:
                    self._peaks.note(accumulated=False)
                    with self._files.plainly():
                        _write(Path(self.request.answer), self._use())
            time.sleep(_TELLS)

    def _use(self) -> dict[str, Any]:
        """Return this process's use of cards, with its time span."""
        used = {
            device: memopt.sim.stats(device)["bytes_peak"] - _received[device]
            for device in range(self.request.devices)
        }
        return {
            "since": self._since,
            "until": seconds_since_boot(),
            "devices": {
                device: [*self._peaks.of.get(device, (0, 0)), peak]
                for device, peak in used.items()
                if peak > self.request.context and self._since  # a context alone, each card has
            },
            "steps": self._loops.done,
            **_coverage_so_far(self._loops),
        }

    # ---- the answer ---------------------------------------------------------------------------------------------

    def answer(self, end: End) -> None:
        with self._answering:
            if self._answered or not (self._main or self._since):
                return
            self._answered = True
            with self._files.plainly():
                self._tell(end)

    def _tell(self, end: End) -> None:
        self._peaks.note()
        answer = self._figures() | self._how_it_ended(end) | self._attribution() | self._process_facts()
        answer |= _coverage(end, self._loops, self._passes)
        answer["covered"] += answer.pop("unrecorded")
        answer["seconds"] = round(time.monotonic() - self._started, 3)
        answer["host_peak"] = peak_resident_bytes()
        _write(Path(self.request.answer), answer)

    def _figures(self) -> dict[str, Any]:
        devices = range(self.request.devices)
        return {
            **self._use(),
            "peak_allocated": self._peaks.allocated,
            "peak_reserved": self._peaks.reserved,
            "device_peak": max(memopt.sim.stats(device)["bytes_peak"] for device in devices),
            "retries": self._peaks.retries,
            "guesses": self._guesses.rows(),
            "hangs_on_fraction": self._guesses.hang_on_fraction,
            "cudnn": memopt.sim.workspace_reads() > 0,
            "unmodelled": [f"{name} ({count} calls)" for name, count in memopt.sim.missing_calls().items()],
            "files_not_kept": self._files.written(),
            "techniques": self._techniques.applied,
            "refused": self._techniques.refused,
            "host_bytes": memopt.sim.stats()["host_bytes_peak"] + self._made_on_host(),
            "disk_bytes": 0 if self._values is None else self._values.host.disk_peak,
            "trained_bytes": self._trained_bytes,
            "keeps": None if self._kept is None else self._kept.names(),
            "step": None if self._step is None else self._step.segments(),
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
        every = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in every if is_user_file(frame.filename) and frame.filename != __file__]
        innermost = frames[-1] if frames else None
        return {
            "file": innermost and innermost.filename,
            "line": innermost and innermost.lineno,
            "text": innermost and innermost.line,
            "function": innermost and innermost.name,
            "asked": failed and failed.asked,
            "allocated": failed and failed.allocated,
            "evaluates": failed is not None
            and not failed.gradients
            and self._loops.trained
            and not any(frame.filename.startswith(_TRAINING) for frame in every),
            "message": str(error),
        }

    def _attribution(self) -> dict[str, Any]:
        """Return the bytes at the peak by category, line and module; all None without a recorder."""
        if self._recorder is None:
            return {
                "by_category": None,
                "by_line": None,
                "by_module": None,
                "moments": None,
                "before_training": None,
                "unrecorded": [],
            }
        recording = self._recorder.recording()
        recording.facts["simulated"] = self._simulated()
        if self.request.recording is not None:
            recording_file.save(recording, self.request.recording)
        unrecorded = self._unrecorded(recording)
        return {
            "by_category": recording.by_category(),
            "by_line": _rows(recording.by_line()),
            "by_module": _rows(recording.by_module()),
            "recorded_peak": recording.peak()[0],
            "moments": None if unrecorded else moments.of(recording),
            "before_training": _before_training(recording),
            "unrecorded": unrecorded,
        }

    def _unrecorded(self, recording: Recording) -> list[str]:
        """Return what to say if the peak was before the events that are kept."""
        recorded, kept = recording.peak()[0], self.request.events
        if recording.events < kept // 2 or recorded >= _MOST_OF * self._peaks.allocated:
            return []
        size = _C.format_size(recorded)
        return [f"categories, lines and modules are of the last {kept} allocations and frees, at most {size}"]

    def _process_facts(self) -> dict[str, Any]:
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


def _before_training(recording: Recording) -> dict[str, Any] | None:
    """Return the most bytes that live before training begins, and the lines that most of them are of."""
    begins = next((mark.event for mark in recording.marks if mark.kind == _BEGINS), None)
    if begins is None:
        return None
    live = recording.live_bytes()[: begins + 2]
    at = int(live.argmax())
    return {"bytes": int(live[at]), "lines": _rows(recording.by_line(at - 1)[:_LINES])}


def _rows(lines: list[Line]) -> list[dict[str, Any]]:
    return [line._asdict() for line in lines]


def _write(path: Path, answer: dict[str, Any]) -> None:
    """Write all of it or nothing, because a reader may be waiting for the file."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(answer, indent=1) + "\n")
    part.replace(path)


# ---- what was covered ------------------------------------------------------------------------------------------------


_PLACES = 4
_HOW = {"steps": "after its steps", "batches": "to its last batch"}


def _coverage(end: End, loops: Loops, passes: LoaderPasses) -> dict[str, Any]:
    """Return what was covered, for the child's answer."""
    count, what = (
        (loops.done, "step") if loops.done or not loops.backwards else (loops.backwards, "backward pass")
    )
    plural = "" if count == 1 else "es" if what.endswith("s") else "s"
    covered = [
        _covered(end, f"{count} {what}{plural}", loops),
        _early(loops),
        _growing(loops),
        *passes.kept.values(),
        *passes.read.values(),
    ]
    return {"covered": [line for line in covered if line], **_coverage_so_far(loops)}


def _coverage_so_far(loops: Loops) -> dict[str, Any]:
    return {
        "trained": loops.trained,
        "shortened": sorted(set(loops.short.values())),
    }


def _covered(end: End, steps: str, loops: Loops) -> str:
    if end.stopped == "steps":
        return f"{steps}, then it was ended{_at(end)}: what follows was not seen"
    if end.stopped == "seconds":
        return f"{steps}, then it was stopped by its time limit{_at(end)}: what follows was not seen"
    if end.stopped == "error":
        return f"{steps} before it ran out of memory" if end.out_of_memory else ""
    if not loops.short:
        return f"{steps}: the whole script"
    places = [f"{Path(where).name} {_HOW.get(how, f'after {how}')}" for where, how in loops.short.items()]
    more = f", {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return f"{steps}, then shortened loops ({', '.join(places[:_PLACES])}{more}): the script ran to its end"


def _early(loops: Loops) -> str:
    turns = [f"{Path(where).name} (every {every})" for where, every in loops.early.items()]
    return f"once out of turn, in the last iteration: {', '.join(turns)}" if turns else ""


def _growing(loops: Loops) -> str:
    kept = [f"{Path(where).name} {_C.format_size(size)}" for where, size in loops.grows.items()]
    return (
        f"memory grows with each iteration, and only the iterations that ran are counted: {', '.join(kept)}"
        if kept
        else ""
    )


def _at(end: End) -> str:
    return f" at {end.where}" if end.where else ""


# ---- tensors of other processes --------------------------------------------------------------------------------------


_received: Counter[int] = Counter()  # bytes, by device


def _share_tensors() -> None:
    """Let this process receive tensors on a card from another.

    They lie beside the allocator's memory, in memory that is not counted here because it is the sender's, and their
    values are unknown.
    """
    storage: Any = torch.UntypedStorage
    storage._share_cuda_ = _share
    storage._new_shared_cuda = classmethod(_receive)
    storage._release_ipc_counter_cuda = classmethod(lambda *_: None)


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    handle = f"{os.getpid()} {storage.data_ptr()} {storage.nbytes()}".encode()
    return storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False


def _receive(kind: Any, device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
    place = torch.device("cuda", device)
    if not size:
        return torch.UntypedStorage(0, device=place)
    at = ctypes.c_uint64()
    with torch.cuda.device(place):
        torch.cuda.current_stream().synchronize()  # the device has its context
        status = ctypes.CDLL(str(_activation.libraries() / "sim_cuda.so")).cuMemAlloc_v2(
            ctypes.byref(at), ctypes.c_size_t(size)
        )
    if status:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. A tensor of {size} bytes from another process does not fit"
        )
    _received[device] += size
    return torch._C._construct_storage_from_data_pointer(at.value, place, size)  # type: ignore[no-any-return]
