"""Runs of the demo: which process is started when, and what is made of what they tell."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from memopt import _C
from memopt._demo import tasks
from memopt._demo.results import DemoResult, TaskResult, recording_of
from memopt._demo.tasks import Task
from memopt._demo.training_process import Asked
from memopt._estimate import interpreters
from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import Recording
from memopt._runtime.process import Child, Children, Message, ended, hear
from memopt._runtime.terminal_line import TerminalLine, is_terminal

_CNN = Task("cnn", "demo", 256, 2e-3, (("scale", 1), ("width", 16), ("blocks", 5)))
_ABOUT = {
    "gpt": "a character GPT on the source of Python's standard library",
    "cnn": "a residual CNN on scikit-learn's digits",
}


class DemoFailed(RuntimeError):
    """A process of the demo ended without an answer."""


@dataclass(frozen=True)
class Size:
    """The tasks with their steps, and what runs on a simulated GPU if there is no real one."""

    trained: Sequence[tuple[Task, int]]
    simulated: tuple[Task, int] | None


def full() -> Size:
    """Return the full size: a minute or two on two cores; on a GPU the large models."""
    if torch.cuda.is_available():
        return Size([(tasks.get_task("gpt", "large"), 60), (tasks.get_task("cnn", "large"), 60)], None)
    gpt = tasks.get_task("gpt")
    return Size([(gpt, 80), (_CNN, 60)], (replace(gpt, batch_size=8), 5))


def quick() -> Size:
    """Return the quick size: under 40 s on two cores."""
    if torch.cuda.is_available():
        return Size([(tasks.get_task("gpt", "medium"), 20), (tasks.get_task("cnn", "large"), 20)], None)
    gpt = replace(tasks.get_task("gpt"), batch_size=8)
    tiny = replace(gpt, batch_size=4, shape=(("length", 128), ("dim", 64), ("layers", 4), ("heads", 4)))
    return Size([(gpt, 12), (replace(_CNN, batch_size=128), 12)], (tiny, 2))


def run(size: Size, folder: Path, bars: ProgressBars, sim_python: str | None = None) -> DemoResult:
    """Run all trainings of `size`; recordings are written to `folder` ("gpt.plain.mopt" and so on).

    sim_python: a Python whose torch is a CUDA build, for the simulated GPU, if this one's is not. Raises DemoFailed."""
    begun = time.monotonic()
    result = DemoResult()
    with Children() as children:
        for task, steps in size.trained:
            if task.kind == "cnn" and importlib.util.find_spec("sklearn") is None:
                result.notes.append(
                    "the CNN was left out: its digits ship with scikit-learn, which is not installed (pip install "
                    "scikit-learn)"
                )
                continue
            trained = _Trained(result, task, steps, folder, children, bars)
            trained.run()
            result.tasks.append(trained.found)
        if size.simulated and result.tasks:
            _simulate(result, size.simulated, children, bars, sim_python)
    _replay(result, folder)
    result.seconds = time.monotonic() - begun
    result.cores, result.load = _cores(), os.getloadavg()[0]
    return result


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class _Trained:
    """The trainings of one task.

    On a CPU both run side by side, each on half of the cores, so that other load on the machine affects the times of
    both; on a GPU one after the other."""

    def __init__(
        self, result: DemoResult, task: Task, steps: int, folder: Path, children: Children, bars: ProgressBars
    ) -> None:
        self.result, self.task, self.steps, self.folder = result, task, steps, folder
        self.children, self.bars = children, bars
        self.threads = max(1, _cores() // 2)
        shape = ", ".join(f"{name} {n}" for name, n in task.shape)
        self.found = TaskResult(
            task.kind, f"{_ABOUT[task.kind]} (batch {task.batch_size}, {shape}), {steps} steps"
        )
        self.waits = True  # the training within the budget, for the budget
        self.running: dict[Child, str] = {}

    def run(self) -> None:
        self._start("plain", None)
        while self.running:
            child, message = hear([*self.running])
            if message is not None:
                self._heard(self.running[child], message)
                continue
            which = self.running.pop(child)
            told = self.found.plain if which == "plain" else self.found.within
            _check_answered(child, f"{self.task.kind} {which}", "loss" in told or "infeasible" in told)
            self.bars.done(f"{self.task.kind} {which}")
            if self.waits:
                self._start_within()

    def _start(self, which: str, budget: int | None) -> None:
        path = str(recording_of(self.folder, self.task.kind, which))
        asked = Asked(asdict(self.task), self.steps, self.threads, budget, path)
        self.running[_start(self.children, asked)] = which
        self.bars.set(f"{self.task.kind} {which}", "starts")

    def _start_within(self) -> None:
        self.waits = False
        self.found.budget = self.found.plain["peak"] // 2
        self._start("within", self.found.budget)

    def _heard(self, which: str, message: Message) -> None:
        kind, what = message
        name = f"{self.task.kind} {which}"
        if kind == "device":
            self.result.device, self.result.torch = what["name"], what["torch"]
            self.result.on_gpu = what["type"] == "cuda"
        elif kind == "plans":
            self.bars.set(name, "measures and plans")
        elif kind == "step":
            self.bars.set(name, f"loss {what['loss']:.3f}", what["step"], what["of"])
        elif kind == "infeasible":
            self.found.within["infeasible"] = what["text"]
        elif kind == "end":
            (self.found.plain if which == "plain" else self.found.within).update(what)
        elif kind == "peak" and which == "plain":
            self.found.plain["peak"] = what["bytes"]
            if not self.result.on_gpu:
                self._start_within()


def _start(children: Children, asked: Asked, python: str | None = None) -> Child:
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    request = asdict(asked)
    return children.start(
        "memopt._demo.training_process", request=request, python=python, environment=environment
    )


def _check_answered(child: Child, name: str, answered: bool) -> None:
    status = child.end()
    if not answered:
        raise DemoFailed(f"the process of {name} {ended(status)} without an answer:\n{child.said()}")


def _simulate(
    result: DemoResult, job: tuple[Task, int], children: Children, bars: ProgressBars, python: str | None
) -> None:
    task, steps = job
    try:
        python = interpreters.find(python)
    except interpreters.NoInterpreter as error:
        result.simulated["missing"] = str(error)
        return
    # So small matrices gain nothing from two threads, and lose much where another process wants the core.
    asked = Asked(asdict(task), steps, threads=1, simulated=True)
    name = "simulated GPU"
    child = _start(children, asked, python)
    bars.set(name, "starts")
    for kind, what in child:
        if kind == "step":
            bars.set(name, f"on {what['where']}", what["step"], what["of"])
        elif kind == "plans":
            bars.set(name, "measures and plans")
        elif kind == "end":
            result.simulated.update(what)
    bars.done(name)
    _check_answered(child, f"the {name}", bool(result.simulated))


def _replay(result: DemoResult, folder: Path) -> None:
    for task in result.tasks:
        for which in ("plain", "within"):
            path = recording_of(folder, task.name, which)
            if path.exists():
                result.replays[f"{task.name} {which}"] = replay(recording_file.load(path))


# ---- memopt's allocator, given a training's requests -----------------------------------------------------------------


def trace_of(recording: Recording) -> bytes:
    """Return the recording's allocations and frees as a trace (`python -m memopt replay`), with its steps marked."""
    born, died, size = (recording.columns[name] for name in ("born", "died", "size"))
    there = size > 0
    numbers = torch.arange(len(size))[there]
    births = torch.stack((born[there], numbers, size[there]), 1).tolist()
    ended = there & (died < recording.events)
    deaths = torch.stack((died[ended], torch.arange(len(size))[ended]), 1).tolist()
    steps = [mark.event for mark in recording.marks if mark.kind == "step"]
    # One event is one birth or one death; the mark of a step stands behind its event.
    lines = [(at, 0, f"a {number} {nbytes} 0") for at, number, nbytes in births]
    lines += [(at, 0, f"f {number} 0") for at, number in deaths]
    lines += [(at, 1, "s") for at in steps]
    return "".join(f"{text}\n" for _, _, text in sorted(lines, key=lambda line: line[:2])).encode()


def replay(recording: Recording) -> dict[str, int]:
    """Return bytes.

    live: the most that lived at once. held: the most that the allocator held of a device with plenty. smallest_device:
    the smallest on which the run completes."""
    trace = trace_of(recording)
    plenty, least = (
        _C.replay(trace, 0, 20, 0, True, True, False, False, -1, search) for search in (False, True)
    )
    return {
        "live": plenty["live_peak"],
        "held": plenty["peak_reserved"],
        "smallest_device": least["frontier"],
    }


# ---- progress --------------------------------------------------------------------------------------------------------


_CELLS = 12
_REDRAWN = 0.1  # seconds


class ProgressBars:
    """set(name, text) and set(name, text, done, of) draw; done(name) takes one off; the block's end clears the line."""

    def __init__(self) -> None:
        self._line = TerminalLine() if is_terminal() else None
        self._bars: dict[str, str] = {}
        self._drawn = 0.0

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._line is not None:
            self._line.draw("")

    def set(self, name: str, text: str, done: int = 0, of: int = 0) -> None:
        new = name not in self._bars
        if of:
            full = _CELLS * done // of
            text = f"{'█' * full}{'░' * (_CELLS - full)} {done}/{of} {text}"
        self._bars[name] = text
        self._draw(new or done == of)

    def done(self, name: str) -> None:
        self._bars.pop(name, None)
        self._draw(True)

    def _draw(self, now: bool) -> None:
        if self._line is None or not (now or time.monotonic() - self._drawn >= _REDRAWN):
            return
        self._drawn = time.monotonic()
        self._line.draw("   ".join(f"{name} {bar}" for name, bar in self._bars.items()))
