"""Release of what the last exception's frames hold; the exception, its text and its traceback lines stay.

IPython keeps the last exception (sys.last_value, and its own tables), which keeps its traceback, its frames, and all
tensors of the call that failed. The frames are cleared.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from memopt import _C
from memopt._memory.live import heap_snapshot
from memopt._memory.oom import exceptions
from memopt._memory.release import give_back


@dataclass(frozen=True)
class ReleasedFrames:
    """The result of a release. `freed`: bytes by device; `left`: bytes of tensors that are still alive."""

    freed: dict[str, int]
    left: dict[str, int]
    error: str

    def __str__(self) -> str:
        if not self.error:
            return "memopt: there is no exception whose frames could hold anything"
        sizes = [f"{_C.format_size(size)} on {device}" for device, size in self.freed.items() if size]
        left = ", ".join(f"{_C.format_size(size)} on {device}" for device, size in self.left.items())
        freed = ", ".join(sizes) or "nothing"
        return f"memopt: freed {freed} that {self.error}'s frames held; live: {left or 'nothing'}"

    __repr__ = __str__


def release(error: BaseException | None = None) -> ReleasedFrames:
    """Clear the frames of an exception (by default the last one shown) and of those that it followed.

    Then garbage is collected and free device memory is given back. %debug finds no locals afterwards.
    """
    found = error if error is not None else getattr(sys, "last_value", None)
    before = _live()
    exceptions.empty_frames(found)
    give_back()
    left = _live()
    freed = {device: size - left.get(device, 0) for device, size in before.items()}
    return ReleasedFrames(freed, left, type(found).__name__ if found is not None else "")


def _live() -> dict[str, int]:
    taken = heap_snapshot.take(seconds=0)
    sums: dict[str, int] = {}
    for one in taken.held.values():
        sums[one.device] = sums.get(one.device, 0) + one.nbytes
    taken.forget()
    return sums
