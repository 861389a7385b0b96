"""Whose line a warning is about."""

from __future__ import annotations

import sys


def stacklevel() -> int:
    """For warnings.warn() in the function that calls this: the first caller that is neither memopt nor torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("memopt", "torch"):
        frame, level = frame.f_back, level + 1
    return level
