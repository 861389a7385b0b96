"""The hook where IPython shows an exception: it prints the report of an out-of-memory error after the traceback, and
after that error or an interrupt releases what the traceback's frames hold.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from memopt import _C
from memopt._memory.live import heap_snapshot
from memopt._memory.oom import exceptions, observer
from memopt._memory.oom.exceptions import is_out_of_memory
from memopt._memory.release import give_back


class ShownExceptions:
    """A replacement of a shell's showtraceback, until remove()."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = shell.showtraceback
        shell.showtraceback = self._show

    def remove(self) -> None:
        """Restore the hook that was there before; one that was installed since stays."""
        if self._shell.showtraceback == self._show:
            self._shell.showtraceback = self._before

    def _show(self, exc_tuple: Any = None, *arguments: Any, **named: Any) -> Any:
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        try:
            shown = self._before(exc_tuple, *arguments, **named)
        finally:
            observer.show(error)
        if isinstance(error, KeyboardInterrupt) or is_out_of_memory(error):
            # The handler that calls this holds the exception, and the frame that runs it stays as it is.
            released = release(error)
            if any(released.freed.values()):
                print(released)
        return shown


def shell() -> Any:
    """Return IPython's shell, None outside IPython."""
    interactive = sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None


_shown: ShownExceptions | None = None


def install() -> None:
    global _shown
    found = shell()
    if found is not None and _shown is None:
        _shown = ShownExceptions(found)


def remove() -> None:
    global _shown
    if _shown is not None:
        _shown.remove()
        _shown = None


# ---- release ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReleasedFrames:
    """The result of a release. `freed`: bytes by device; `left`: bytes of tensors that are still alive."""

    freed: dict[str, int]
    left: dict[str, int]
    error: str

    def __str__(self) -> str:
        if not self.error:
            return "memopt: there is no exception whose frames could hold memory"
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
