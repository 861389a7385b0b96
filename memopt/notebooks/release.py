"""After an exception: what its frames hold is let go, and what was printed of it stays.

IPython keeps the last exception (sys.last_value, and its own tables), that its traceback, this its frames, and they all
the tensors of the call that failed. The frames are emptied; the exception, its text and its lines are as they were."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from memopt import _C
from memopt.owners import census, dead_frames
from memopt.releasing import give_back


@dataclass(frozen=True)
class Released:
    """`freed`: bytes by device; `left`: of tensors that are still there."""

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


def release(error: BaseException | None = None) -> Released:
    """Empties the frames of an exception (the last one that was shown, by default) and of those that it followed, then
    has the collector run and gives free device memory back. %debug finds no locals afterwards."""
    found = error if error is not None else getattr(sys, "last_value", None)
    before = _live()
    dead_frames.empty(found)
    give_back()
    left = _live()
    freed = {device: size - left.get(device, 0) for device, size in before.items()}
    return Released(freed, left, type(found).__name__ if found is not None else "")


def _live() -> dict[str, int]:
    taken = census.take(seconds=0)
    sums: dict[str, int] = {}
    for one in taken.held.values():
        sums[one.device] = sums.get(one.device, 0) + one.nbytes
    taken.forget()
    return sums
