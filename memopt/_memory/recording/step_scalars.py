"""A recording as a few numbers for each step, for a curve over the training."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memopt._memory.recording.recording import CATEGORIES, Recording


class StepScalars(NamedTuple):
    """Bytes in one step.

    `peak`: most alive at once; `categories`: the peak by category; `after`: alive when the step has ended; `held`: most
    held by the allocator, None if not known. `event`: the last of the step; `time_us`: of its end.
    """

    event: int
    time_us: int
    peak: int
    categories: dict[str, int]
    after: int
    held: int | None


def step_scalars(recording: Recording) -> list[StepScalars]:
    """Return the scalars of the steps that have ended, each from the end of the one before it.

    A step without a birth or a death has the values that the one before left.
    """
    ends = [mark.event for mark in recording.marks if mark.kind == "step"]
    if not ends or not recording.events:
        return []
    by_category = torch.stack([recording.live_bytes(n) for n in range(len(CATEGORIES))])
    live = by_category.sum(0)
    found = []
    begin = -1
    for end in ends:
        at = begin + 1 + int(live[begin + 1 : end + 2].argmax())  # live[n + 1] is what lives after event n
        found.append(
            StepScalars(
                event=end,
                time_us=int(recording.times_us[max(end, 0)]),
                peak=int(live[at]),
                categories=dict(zip(CATEGORIES, by_category[:, at].tolist(), strict=True)),
                after=int(live[end + 1]),
                held=_held(recording, begin, end),
            )
        )
        begin = end
    return found


def _held(recording: Recording, begin: int, end: int) -> int | None:
    """Return the most bytes held during a step, those at its beginning included."""
    upto = int(torch.searchsorted(recording.reserved_events, end, right=True))
    since = int(torch.searchsorted(recording.reserved_events, begin, right=True))
    chosen = recording.reserved_bytes[max(since - 1, 0) : upto]
    return int(chosen.max()) if len(chosen) else None
