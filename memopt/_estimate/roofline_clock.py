"""The clock of a card that is not here, for what is timed on the simulated one in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from memopt._estimate.cards import Rates
from memopt._estimate.step_time import seconds
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

    repeats = 1

    def __init__(
        self,
        folder: Path,
        rates: Rates,
        interrupt: Callable[[], None],
        plainly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._folder, self._rates, self._interrupt, self._plainly = folder, rates, interrupt, plainly
        self._observation: Observation | None = None
        self._counters: dict[str, int] = {}
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._plainly():
            self._interrupt()
            self._begin()
        try:
            yield
        finally:
            with self._plainly():
                self._end()

    def now(self, device: torch.device) -> float:
        del device
        with self._plainly():
            text, before = self._end(), self._counters
            if text is not None:
                self._seconds += seconds(segments(text, [before, counters()]), self._rates)
                self._begin()
        return self._seconds

    def _begin(self) -> None:
        observation = Observation(self._folder)
        self._observation, self._counters = observation if observation.begins else None, counters()

    def _end(self) -> str | None:
        if self._observation is None:
            return None
        self._observation.mark()
        text = self._observation.end()
        self._observation = None
        return text
