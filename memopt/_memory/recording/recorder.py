"""The recorder of this process: one at a time, by the allocator's history on CUDA, by torch's allocator on the CPU."""

from __future__ import annotations

import os
import platform
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt._memory.recording.recording import ACTIVATIONS, INPUTS, OPTIMIZER, OTHER, Mark, Recording, Stack
from memopt._memory.recording.torch_hooks import Attributions, ProgramHooks

MAX_EVENTS = 200_000

_lock = threading.Lock()
_active: Recorder | None = None


def active() -> Recorder | None:
    """Return the recorder that runs in this process, None without one; in a forked child none runs."""
    return _active


def start(
    device: torch.device | str | int | None = None, *, modules: bool = True, max_events: int = MAX_EVENTS
) -> Recorder:
    """Start recording.

    device: a CUDA device records all CUDA devices, "cpu" torch's host memory; by default CUDA if there is a device,
    else the CPU. modules: note which module's forward runs. max_events: number of births and deaths of blocks that are
    kept, the most recent ones.

    Raises RuntimeError if a recorder runs already, or if there is no such device.
    """
    global _active
    from memopt._memory.recording import cuda_recorder

    if max_events < 1:
        raise ValueError(f"max_events={max_events}: keep at least one event")
    kind = torch.device(device if device is not None else ("cuda" if cuda_is_here() else "cpu")).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the CPU and CUDA devices can be recorded")
    if kind == "cuda" and not cuda_is_here():
        raise RuntimeError(
            f"device={device!r}: there is no CUDA device here, or torch is a CPU build: leave device out"
        )
    with _lock:
        if _active is not None:
            raise RuntimeError("memory is already being recorded in this process: stop that recorder first")
        if kind == "cuda":
            recorder: Recorder = cuda_recorder.CudaRecorder(max_events)
            recorder._start(modules)
        else:
            recorder = _start_cpu(max_events, modules)
        _active = recorder
    return recorder


def _start_cpu(max_events: int, modules: bool) -> Recorder:
    from memopt._memory.recording import cpu_recorders

    recorder: Recorder = cpu_recorders.CpuRecorder(max_events)
    try:
        recorder._start(modules)
    except memopt.Error:  # this torch's allocator is not as it is known, or the program has its own
        recorder = cpu_recorders.OperationsRecorder(max_events)
        recorder._start(modules)
    return recorder


def cuda_is_here() -> bool:
    """Return whether there is a CUDA device, without asking its driver: that would break a later fork."""
    if torch.version.cuda is None:
        return False
    sim = sys.modules.get("memopt.sim")
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or (sim is not None and sim.is_active())


class Phases:
    """The phases of a program on one device: positions of their beginnings and ends, and their stacks."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, Stack]] = []
        self._open: dict[str, tuple[int, Stack]] = {}

    def begin(self, phase: str, position: int, stack: Stack) -> None:
        self.end("forward", position)
        self._open[phase] = position, stack

    def end(self, phase: str, position: int) -> None:
        opened = self._open.pop(phase, None)
        if opened is not None:
            self.spans.append((phase, opened[0], position, opened[1]))

    def all(self, position: int) -> list[tuple[str, int, int, Stack]]:
        """The open ones too, as if they ended here."""
        return [*self.spans, *((phase, at, position, stack) for phase, (at, stack) in self._open.items())]

    def forget(self, position: int) -> None:
        self.spans = [span for span in self.spans if span[2] >= position]


class Watch:
    """Facts about one device besides its blocks. Positions are numbers of births and deaths since start()."""

    def __init__(self) -> None:
        self.attributions = Attributions()
        self.phases = Phases()
        self.marks: list[tuple[int, str, str]] = []

    def forget(self, position: int) -> None:
        self.attributions.forget(position)
        self.phases.forget(position)
        self.marks = [mark for mark in self.marks if mark[0] >= position]


class Recorder(ABC):
    """A recorder, which runs until stop(). recording() returns what it has seen so far, as often as it is called."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._program = ProgramHooks(self)
        self._pid = os.getpid()
        self._modules = True

    @abstractmethod
    def devices(self) -> list[str]:
        """Return the devices with anything recorded, the current one first."""

    @abstractmethod
    def position(self, device: str) -> int:
        """Return the number of births and deaths on a device since start()."""

    @abstractmethod
    def recording(
        self, device: torch.device | str | int | None = None, *, since: int | None = None
    ) -> Recording:
        """Return the recording of a device so far, by default the current one; since: from this position() on."""

    @abstractmethod
    def _start(self, modules: bool) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...

    def stop(self) -> None:
        """Stop recording and drop the events: call recording() before. A second call does nothing."""
        global _active
        with _lock:
            if _active is not self:
                return
            _active = None
        self._program.stop()
        self._stop()

    @abstractmethod
    def _now(self) -> list[tuple[Watch, int]]:
        """Return the devices in use, each with the position that it is at."""

    def mark(self, kind: str, text: str = "") -> None:
        """Add a mark of the program's at the current event."""
        for watch, position in self._now():
            watch.marks.append((position, kind, text))

    def recordings(self) -> list[Recording]:
        """Return the recordings of all devices with anything recorded."""
        return [self.recording(device) for device in self.devices()]

    # ---- what the program tells (ProgramHooks) ------------------------------------------------------------------

    @abstractmethod
    def attribute(self, tensors: Iterable[torch.Tensor], category: int) -> None: ...

    def begins(self, phase: str, stack: Stack) -> None:
        """Note the beginning of "forward" (the first since a backward pass or a step), "backward" or "step"
        (optimizer's)."""
        for watch, position in self._now():
            watch.phases.begin(phase, position, stack)

    def ends(self, phase: str) -> None:
        """End "backward" or "step"; a forward pass ends with what begins after it."""
        for watch, position in self._now():
            watch.phases.end(phase, position)
        if phase == "step":
            self.mark("step")


def categories_of(
    columns: dict[str, torch.Tensor], watch: Watch, first: int, position: int, events: int
) -> torch.Tensor:
    """Return each block's category: the one attributed for it, else the phase of the program in which it was made.

    first: the position of event 0.
    """
    born = columns["born"]
    found = watch.attributions.categories(born, columns["died"], columns["address"], first)
    # A module's input that another module made is an activation of the program, not an input.
    made_inside = columns["module"] > 0
    found[(found == INPUTS) & made_inside] = OTHER
    graph = torch.zeros(
        events + 1, dtype=torch.bool
    )  # event: from a forward pass to the end of its backward pass
    step = torch.zeros(events + 1, dtype=torch.bool)
    for phase, begin, end, _ in sorted(watch.phases.all(position), key=lambda span: (span[1], -span[2])):
        span = slice(max(begin - first, 0), max(end - first, 0))
        if phase == "step":
            step[span] = True
        else:
            graph[span] = True
            # The passes of its closure are within it. What is within a backward pass comes after that in this order.
            step[span] = False
    free = (found == OTHER) & (born >= 0)
    at = born.clamp(min=0, max=max(events - 1, 0))
    found[free & (made_inside | graph[at])] = ACTIVATIONS
    found[free & step[at]] = OPTIMIZER
    return found


def marks_of(watch: Watch, first: int) -> list[Mark]:
    return [Mark(at - first - 1, kind, text) for at, kind, text in watch.marks if at - first - 1 >= -1]


def facts() -> dict[str, Any]:
    """Return facts about this run."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "pid": os.getpid(),
        "versions": {
            "memopt": memopt.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


def _forget_in_child() -> None:
    global _active, _lock
    if _active is not None:
        _active._program.stop()
    _active, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
