"""A recording as a few numbers a step: what a curve over the training is drawn of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memopt.profiling.recording import CATEGORIES, Recording


class StepScalars(NamedTuple):
    """Bytes in one step: `peak`, the most that lived at once; `categories`, what that was, which adds up to it;
    `after`, what lives when the step has ended; `held`, the most that the allocator held, None where nothing says.
    `event`: the last of the step; `time_us`: of its end."""

    event: int
    time_us: int
    peak: int
    categories: dict[str, int]
    after: int
    held: int | None


def step_scalars(recording: Recording) -> list[StepScalars]:
    """Of the steps that have ended: each from the end of the one before it to its own. One without a birth or a death
    is as the one before left it."""
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
    """What was held when the step began counts, too."""
    upto = int(torch.searchsorted(recording.reserved_events, end, right=True))
    since = int(torch.searchsorted(recording.reserved_events, begin, right=True))
    chosen = recording.reserved_bytes[max(since - 1, 0) : upto]
    return int(chosen.max()) if len(chosen) else None
