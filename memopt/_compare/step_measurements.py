"""One way of doing a step, measured from nothing: live bytes at the peak, seconds, losses."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from memopt._memory.oom import exceptions
from memopt._memory.oom.exceptions import out_of_memory_in
from memopt._memory.recording import recorder
from memopt._memory.recording.recording import CATEGORIES, Recording

Step = Callable[[], Any]
Build = Callable[[], Step]

# Steps under the recorder: the first lets an optimizer make its state, the second is an ordinary one.
RECORDED = 2
FEWEST = 3
_MAX_EVENTS = 1_000_000


@dataclass(frozen=True)
class MeasuredStep:
    """`peak`: the most bytes that lived at once during the steps, of what the variant made; `by_category` is what they
    were for, and adds up to it. `building`: the same while it was built. `held`: the most that the CUDA allocator held
    of the device, None on the CPU. `resident`: by how much the process grew at the most, in bytes, where it had one of
    its own.

    `seconds`: of each timed step; none on a simulated device, where they say nothing. `losses`: of every step; none
    where steps return none. `failed`: the first words of the out of memory that ended it, "" where none did."""

    peak: int
    by_category: dict[str, int]
    building: int
    held: int | None
    resident: int | None
    seconds: list[float]
    losses: list[float]
    failed: str = ""

    @property
    def step_seconds(self) -> float | None:
        """The median."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Of the seconds: half of the steps took between these."""
        if not self.seconds:
            return None
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return self.losses[-1] if self.losses else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "step_seconds": self.step_seconds, "loss": self.loss}


def measure(build: Build, steps: int, device: str) -> MeasuredStep:
    """Builds, takes `steps` steps, and forgets it all: settle() comes before the first. device: "cpu" or "cuda".

    Raises what build and the steps raise, but for an out-of-memory error, which is a result."""
    seconds: list[float] = []
    losses: list[float] = []
    watched = _Watched(device)
    failed = ""
    step: Step | None = None
    try:
        step = build()
        if not callable(step):
            raise TypeError(
                f"{_name(build)} gave {type(step).__name__}: a variant is a function that builds what a step needs and "
                "returns the step, a function without arguments"
            )
        watched.built()
        for _ in range(RECORDED):
            _take(step, losses)
        watched.close()
        for _ in range(steps - RECORDED):
            seconds.append(_timed(step, losses, device))
    except Exception as error:
        found = out_of_memory_in(error)
        if found is None:
            raise
        failed = ". ".join(str(found).split(". ")[:2]) or type(found).__name__
        exceptions.empty_frames(error)  # they hold the step's tensors
    finally:
        watched.close()
        del step
        settle()
    if _simulated(device):
        seconds = []
    return MeasuredStep(
        peak=watched.peak,
        by_category=watched.by_category,
        building=watched.building,
        held=watched.held,
        resident=None,
        seconds=seconds,
        losses=losses,
        failed=failed,
    )


def settle() -> None:
    """Free unreferenced memory, cuBLAS's workspaces too, which are made once, by the first variant."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class _Watched:
    """A recording from now until close(), of which only what was born in it counts."""

    def __init__(self, device: str) -> None:
        self.peak, self.building, self.held = 0, 0, None
        self.by_category = dict.fromkeys(CATEGORIES, 0)
        self._device = device
        running = recorder.active()
        self._own = running is None
        self._recorder: recorder.Recorder | None = running or recorder.start(device, max_events=_MAX_EVENTS)
        self._since = {name: self._recorder.position(name) for name in self._recorder.devices()}
        self._built: dict[str, int] = {}

    def built(self) -> None:
        assert self._recorder is not None
        self._built = {name: self._recorder.position(name) for name in self._recorder.devices()}

    def close(self) -> None:
        running, self._recorder = self._recorder, None
        if running is None:
            return
        try:
            for name in running.devices():
                if name.startswith(self._device):
                    self._read(running, name)
        finally:
            if self._own:
                running.stop()

    def _read(self, running: recorder.Recorder, name: str) -> None:
        since = self._since.get(name, 0)
        found = running.recording(name, since=since)
        if running.position(name) - since > found.events > _MAX_EVENTS // 2:
            raise RuntimeError(
                f"building and {RECORDED} steps make more than {found.events} allocations and frees: too many to record"
            )
        if self._device == "cuda":
            self.held = (self.held or 0) + torch.cuda.max_memory_reserved(name)
        own = _only_new(found)
        live = own.live_bytes()
        built = max(self._built.get(name, since) - since, 0)
        self.building += int(live[: built + 1].max())
        event = int(live[built:].argmax()) + built - 1
        self.peak += int(live[event + 1])
        for category, size in own.by_category(event).items():
            self.by_category[category] += size


def _only_new(recording: Recording) -> Recording:
    new = recording.columns["born"] >= 0
    return replace(recording, columns={name: column[new] for name, column in recording.columns.items()})


def _take(step: Step, losses: list[float]) -> None:
    loss = step()
    if loss is not None:
        losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))


def _timed(step: Step, losses: list[float], device: str) -> float:
    """With reading the loss, which waits for the device."""
    begun = time.perf_counter()
    _take(step, losses)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _simulated(device: str) -> bool:
    sim = sys.modules.get("memopt.sim")
    return device == "cuda" and sim is not None and sim.is_active()


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))
