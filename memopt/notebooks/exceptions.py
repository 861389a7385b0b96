"""Where IPython shows an exception: before it the report of the out of memory that it is, after it the release of what
its frames hold, if it was one, or an interrupt of what ran."""

from __future__ import annotations

import sys
from typing import Any

from memopt.notebooks.release import release
from memopt.oom import uncaught
from memopt.oom.recognition import is_out_of_memory


class ShownExceptions:
    """Stands before a shell's showtraceback until remove()."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = shell.showtraceback
        shell.showtraceback = self._show

    def remove(self) -> None:
        """What somebody has put there in the meantime stays."""
        if self._shell.showtraceback == self._show:
            self._shell.showtraceback = self._before

    def _show(self, exc_tuple: Any = None, *arguments: Any, **named: Any) -> Any:
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        try:
            uncaught.show(error)
        finally:
            shown = self._before(exc_tuple, *arguments, **named)
        if isinstance(error, KeyboardInterrupt) or is_out_of_memory(error):
            # The handler that calls this holds the exception, and the frame that runs it stays as it is.
            released = release(error)
            if any(released.freed.values()):
                print(released)
        return shown


def shell() -> Any:
    """IPython's, None where Python runs without."""
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
