"""The process in which the script runs, and the request to it.

It ends as the script does; what was recorded is written when the interpreter ends, however it ends, but for a signal
that cannot be caught: then the parent tells what it saw.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import shlex
import signal
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._run.plan import Plan, plain
from memopt._run.ranks_folder import Place
from memopt._run.user_program import call_after_torch, run_as_main
from memopt._runtime.table import line_width, with_command

if TYPE_CHECKING:
    import torch

    from memopt._memory.live.figures import FiguresThread
    from memopt._memory.recording.recorder import Recorder
    from memopt._memory.recording.recording import Recording
    from memopt._run.peaks import Peaks
    from memopt._run.techniques import Techniques


@dataclass(frozen=True)
class RunRequest:
    """folder: the run's own, for summary.txt, failure.txt and progress.json. output: of the recording, None for the
    default name. simulated: settings of a simulated card on which it runs, None for what the machine has. plan: what
    is done to the script. live: whether the figures for a live view are written."""

    argv: list[str]
    module: bool
    folder: str
    output: str | None = None
    record: bool = True
    device: str | None = None
    max_events: int = 200_000
    backend: str | None = None
    memory_budget: int | None = None
    on_oom: str | None = None
    simulated: str | None = None
    plan: Plan | None = None
    live: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RunRequest:
        told = json.loads(text)
        return RunRequest(**told | {"plan": told["plan"] and Plan(**told["plan"])})

    @property
    def name(self) -> str:
        """Return the program's name, for a file's name."""
        return self.argv[0].rpartition(".")[2] if self.module else Path(self.argv[0]).stem


_PACKAGE = str(Path(__file__).resolve().parents[1])
# Files by whose frames operations of a simulated device are computed, and those through which torch calls them.
_COMPUTES = tuple(
    os.path.join("memopt", *names) for names in (("_estimate", "values.py"), ("sim", "_compute.py"))
)
_DISPATCHES = tuple(
    os.path.join("torch", *names) for names in (("_compile.py",), ("_dynamo", "eval_frame.py"))
)
_PROGRESS_SECONDS = 0.5
_MOST_ROWS = 100  # of lines, and of modules


def main() -> None:
    """Run `python -c "from memopt._run.run_child import main; main()" REQUEST`."""
    if "linecache" in sys.modules:  # CPython 3.13 shows that command's text where a program executes a string
        sys.modules["linecache"].cache.pop("<string>", None)
        getattr(sys.modules["linecache"], "_interactive_cache", {}).clear()  # since 3.13.4
    request = RunRequest.from_json(sys.argv[1])
    # The parent has blocked what it waits for, and a mask is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ended_by: list[BaseException] = []
    atexit.register(_end_as_interrupted, ended_by)  # the first, so it runs last
    run = _Run(request)
    run.prepare()
    try:
        run_as_main(request.argv, request.module)
    except SystemExit:
        raise
    except BaseException as error:
        ended_by.append(error)
        _show_only_the_programs_frames(interrupts=request.simulated is None)
        raise


def _end_as_interrupted(ended_by: list[BaseException]) -> None:
    """End with the signal.

    An interpreter ended by an interrupt dies of the signal, unless code has been run from a string since, as by imports
    in finish(): then it would end with 1."""
    if any(isinstance(error, KeyboardInterrupt) for error in ended_by):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _show_only_the_programs_frames(interrupts: bool) -> None:
    """Show only the program's frames.

    interrupts: whether an uncaught interrupt is shown too; otherwise the parent reports it."""
    hook = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        if issubclass(kind, KeyboardInterrupt) and not interrupts:
            return None
        _leave_out_the_simulation(trace)
        return hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = shown


def _leave_out_the_simulation(trace: TracebackType | None) -> None:
    """End a traceback where torch gives an operation to the simulated device, below which nothing is the program's."""
    last = trace
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(_COMPUTES) and last is not None:
            last.tb_next = None
            return
        if not file.endswith(_DISPATCHES):
            last = trace
        trace = trace.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<string>", "<frozen"))


def _end_forked_children(handler: Callable[..., None]) -> None:
    """Let SIGTERM end a forked child, from its first instant on, unless the program has set a handler of its own.

    Python forgets signals that its handlers have seen before the child has become an interpreter of its own."""
    before = threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def release_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) == handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_in_child)


class StepClock:
    """The time from one step of an optimizer to its next, of the first optimizer that steps and its first steps.

    Nothing waits for the device: a host that queues steps without end waits by itself once the queue is full.
    """

    _UNSTEADY, _MOST = 2, 100  # steps: at first kernels are loaded and memory is requested

    def __init__(self) -> None:
        self._of: weakref.ref[Any] | None = None
        self._times: list[float] = []

    def stepped(self, optimizer: Any, now: float) -> None:
        """Note the end of a step at a time in seconds."""
        if self._of is None:
            self._of = weakref.ref(optimizer)
        if self._of() is optimizer and len(self._times) <= self._MOST:
            self._times.append(now)

    def median(self) -> float | None:
        """Return the median of the steps after the first two, None if there are none."""
        steady = self._times[self._UNSTEADY - 1 :]
        taken = [after - before for before, after in itertools.pairwise(steady)]
        return statistics.median(taken) if taken else None


class _Run:
    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._folder = Path(request.folder)
        self._pid = os.getpid()
        self._recorder: Recorder | None = None
        self._figures: FiguresThread | None = None
        self._planned: tuple[Techniques, Peaks] | None = None
        self._finished = False
        self._begun = time.monotonic()
        self._steps, self._told = 0, 0.0
        self._clock = StepClock()

    def prepare(self) -> None:
        call_after_torch(self._torch_is_there)
        leave = os._exit

        def finish_and_leave(status: int) -> Any:
            self.finish()
            leave(status)

        os._exit = finish_and_leave
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
            _end_forked_children(self._terminated)
            if Place.of(os.environ) is not None:
                # Of a rank that waits for another one in a collective: no handler of Python's runs there.
                self._stack = open(self._folder / "stack.txt", "w")  # noqa: SIM115
                faulthandler.register(signal.SIGTERM, self._stack, all_threads=False, chain=True)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.finish()
        os.kill(os.getpid(), signal.SIGTERM)

    def _torch_is_there(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        import memopt

        # What the program registers from now on runs before it, what torch has registered after it.
        atexit.register(self.finish)
        asked = self._request
        try:
            memopt.enable(asked.backend, asked.memory_budget, asked.on_oom)  # type: ignore[arg-type]
        except (ValueError, ImportError, memopt.Error) as error:
            print(f"memopt run: {error}", file=sys.stderr)
            sys.exit(2)
        if asked.plan is not None:
            self._apply(asked.plan)
        if asked.record:
            from memopt._memory.recording import recorder

            try:
                self._recorder = recorder.start(asked.device, max_events=asked.max_events)
            except (RuntimeError, ValueError) as error:
                self._failed(f"nothing is recorded: {error}")
        register_optimizer_step_post_hook(self._progress)
        if asked.live:
            from memopt._memory.live.figures import FiguresThread

            self._figures = FiguresThread(
                lambda now: self._tell("live", now.as_dict() | {"steps": self._steps})
            )

    def _apply(self, plan: Plan) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from memopt._run.peaks import Peaks
        from memopt._run.plan import PLANNING
        from memopt._run.techniques import Techniques, trained_bytes

        def check(what: Callable[[], None]) -> None:
            try:
                what()
            except ValueError as error:
                print(f"memopt run: --fit: {error}", file=sys.stderr)
                self._planned = None
                sys.exit(2)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not self._steps:
                check(lambda: plan.check_model(trained_bytes(optimizer)))

        register_optimizer_step_pre_hook(before_step)
        check(lambda: plan.check_torch(torch.__version__))
        if self._request.simulated is None:
            # CUDA is not to begin before the script has it begin: what it forks until then may use it, too.
            torch.cuda._lazy_call(lambda: check(lambda: plan.check_card(torch.cuda.mem_get_info()[1])))
        else:
            # What this machine takes to compute for the card is no reason for another schedule than the planned one.
            from memopt._estimate.cards import Card
            from memopt._estimate.roofline_clock import RooflineClock
            from memopt._runtime import device_clock

            device_clock.use(RooflineClock(self._folder, Card("", plan.card_bytes).rates))
        peaks = Peaks()
        techniques = Techniques(
            plan.techniques,
            lambda kind: peaks.leave_out_planning(kind == PLANNING),
            plan.keeps,
            plan.host_memory,
        )
        self._planned = techniques, peaks

    def _compare(self, plan: Plan, techniques: Techniques, peaks: Peaks) -> None:
        """Write what became of the plan, beside what it promised."""
        size = _C.format_size
        peaks.note()
        missed = [name for name in plan.techniques if plain(name) not in techniques.applied]
        lines = [f"  peak {size(peaks.allocated)} allocated, planned {size(plan.peak_bytes)}"]
        lines += self._compare_step(plan)
        if missed:
            lines.append(f"  of the plan, nothing in the script took: {', '.join(missed)}")
        (self._folder / "fit.txt").write_text("\n".join(lines) + "\n")

    def _compare_step(self, plan: Plan) -> list[str]:
        if not plan.step_seconds:
            return []
        if self._request.simulated is not None:
            return [
                "  a step's seconds are not compared: this machine's processors compute for the simulated card"
            ]
        measured = self._clock.median()
        if measured is None:
            return [f"  too few steps to measure one, planned {plan.step_seconds:.3g} s"]
        of = "a roofline of the card's data sheet"
        return [f"  a step: {measured:.3g} s in the median, planned {plan.step_seconds:.3g} s ({of})"]

    def _progress(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Write the progress that the parent reports for a child that is killed."""
        self._steps += 1
        now = time.monotonic()
        self._clock.stepped(optimizer, now)
        if now - self._told >= _PROGRESS_SECONDS and os.getpid() == self._pid:
            self._told = now
            torch = sys.modules["torch"]
            told: dict[str, Any] = {"steps": self._steps, "seconds": now - self._begun}
            if torch.cuda.is_initialized():
                told["allocated"] = torch.cuda.memory_allocated()
                told["peak_allocated"] = torch.cuda.max_memory_allocated()
            self._tell("progress", told)

    def _tell(self, name: str, what: dict[str, Any]) -> None:
        """Write a file that the parent reads, whole at any time."""
        part = self._folder / f"{name}.part"
        part.write_text(json.dumps(what))
        part.replace(self._folder / f"{name}.json")

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the recording.

        A forked child has nothing to write; a failure here does not change how the program ends."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        if self._figures is not None:
            self._figures.end()
        if self._planned is not None and self._request.plan is not None:
            self._compare(self._request.plan, *self._planned)
        if self._recorder is None:
            return
        try:
            self._write(self._recorder)
        except Exception as error:
            self._failed(f"the recording could not be written: {type(error).__name__}: {error}")

    def _write(self, running: Recorder) -> None:
        from memopt._memory.recording import leaks, recording_file, summary

        try:
            recordings = [recording for recording in running.recordings() if recording.blocks]
        finally:
            running.stop()
        if not recordings:
            self._failed("nothing was recorded: the program allocated on no device")
            return
        path = self._request.output or f"memopt-{self._request.name}.{self._pid}.mopt"
        recording_file.save(recordings, path)
        recordings.sort(key=lambda recording: -recording.peak()[0])
        found = leaks.with_holders(recordings[0], leaks.find(recordings[0]))
        width = line_width(sys.__stderr__)
        texts = [summary.text(recordings[0], found, width=width)]
        texts += [summary.text(recording, width=width) for recording in recordings[1:]]
        texts += with_command(f"recorded in {path}", f"python -m memopt report {shlex.quote(path)}", width)
        (self._folder / "summary.txt").write_text("\n".join(texts) + "\n")
        (self._folder / "figures.json").write_text(json.dumps(_figures(recordings[0])))

    def _failed(self, text: str) -> None:
        (self._folder / "failure.txt").write_text(text + "\n")


def _figures(recording: Recording) -> dict[str, Any]:
    """Return the figures by which the ranks of a job are compared, readable without torch."""
    from memopt._memory.recording import summary

    told = summary.as_dict(recording)
    event = told["peak_event"]
    steps = [mark.event for mark in recording.marks if mark.kind == "step"]
    names = ("device", "peak_bytes", "peak_reserved", "oom", "steps", "by_category")
    return {
        **{name: told[name] for name in names},
        "peak_step": 1 + sum(step < event for step in steps),
        "by_line": told["by_line"][:_MOST_ROWS],
        "by_module": told["by_module"][:_MOST_ROWS],
    }
