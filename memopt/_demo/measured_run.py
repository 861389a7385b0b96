"""One training, measured: what it held at the most in any of its steps, how long they took, what it learned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

import memopt
from memopt._demo.tasks import Batch
from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import Recording

FIRST = 3  # steps after which the peak is told: the optimizer's state is there from the second on
_LAST = 5  # steps whose losses the final one is the mean of
_MAX_EVENTS = 5_000_000  # births and deaths; a step of the demo's has about a thousand


class Training(Protocol):
    model: torch.nn.Module

    def batches(self, steps: int) -> Iterator[Batch]: ...

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


def run(
    training: Training,
    steps: int,
    device: torch.device,
    tell: Callable[..., None],
    *,
    facts: dict[str, Any],
    path: str,
) -> dict[str, Any]:
    """Runs the steps with a recording on, which takes about 1 % of their time. tell(kind, …) hears of each step as it
    ends, and of the peak after the first few. The last steps' recording, with `facts`, goes to `path`."""
    losses: list[float] = []
    seconds: list[float] = []
    with memopt.profile(device.type, max_events=_MAX_EVENTS) as memory:
        batches = training.batches(steps)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            losses.append(training.step(*batch).item())  # .item() waits for the device
            del batch
            seconds.append(time.perf_counter() - begun)
            tell("step", step=len(losses), of=steps, loss=losses[-1])
            if len(losses) == FIRST:
                tell("peak", bytes=memory.peak)
        recording = memory.recording
    recording_file.save(_last_steps(recording, facts), path)
    return {
        "peak": recording.peak()[0],
        "by_category": recording.by_category(),
        "seconds": statistics.median(seconds[FIRST - 1 :]),
        "losses": losses,
        "loss": statistics.fmean(losses[-_LAST:]),
    }


def _last_steps(recording: Recording, facts: dict[str, Any], count: int = 3) -> Recording:
    ends = [mark.event for mark in recording.marks if mark.kind == "step"]
    cut = recording.since(ends[-count - 1]) if len(ends) > count else recording
    cut.facts |= facts
    return cut
