"""The hook where IPython shows an exception: it prints the report of an out-of-memory error before the traceback, and
after an out-of-memory error or an interrupt releases what the traceback's frames hold."""

from __future__ import annotations

import sys
from typing import Any

from memopt._jupyter.release import release
from memopt._memory.oom import observer
from memopt._memory.oom.exceptions import is_out_of_memory


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
            observer.show(error)
        finally:
            shown = self._before(exc_tuple, *arguments, **named)
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
