"""The clock of a card that is not here, for what is timed on the simulated one in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from memopt._estimate.cards import Rates
from memopt._estimate.step_time import Segment, seconds
from memopt._estimate.step_trace import Observation, counters, segments
from memopt._runtime.device_clock import DeviceClock


class RooflineClock(DeviceClock):
    """The time that work would have taken on another card, by a roofline.

    Args:
        folder: For a file.
        rates: The card's.
        interrupt: Called before the clock runs: whatever observes operators is to end.
        plainly: A context in which files are not redirected.
    """

    repeats, exact = 1, True

    def __init__(
        self,
        folder: Path,
        rates: Rates,
        interrupt: Callable[[], None] = lambda: None,
        plainly: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder, self._rates, self._interrupt, self._plainly = folder, rates, interrupt, plainly
        self._observation: Observation | None = None
        self._counters: list[dict[str, int]] = []
        self._segments: list[Segment] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._plainly():
            self._interrupt()
            observation = self._observation = Observation(self._folder)
        self._counters, self._segments = [counters()], []
        try:
            yield
        finally:
            self._observation = None
            _run_backward()
            with self._plainly():
                self._segments = segments(observation.end(), self._counters)

    def now(self, device: torch.device) -> float:
        del device
        if self._observation is not None:
            self._observation.mark()
            self._counters.append(counters())
        return len(self._counters) - 1

    def between(self, begun: float, ended: float) -> float:
        return seconds(self._segments[int(begun) : int(ended)], self._rates)


def _run_backward() -> None:
    """Have the thread of the device's backward passes come to another one, so that the last one's operators have
    ended: it says that a pass is done before that."""
    if torch.cuda.is_initialized():
        with torch.enable_grad():
            end = torch.zeros((), device="cuda", requires_grad=True) * 1
        engine: Any = torch.autograd.Variable._execution_engine  # past what counts the script's passes
        engine.run_backward((end,), (torch.zeros_like(end),), False, False, (), True, True)
