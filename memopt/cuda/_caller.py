"""The stack level of the user's line, for warnings."""

from __future__ import annotations

import sys


def stacklevel() -> int:
    """Return the stacklevel for warnings.warn() in the calling function: the first caller outside memopt and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("memopt", "torch"):
        frame, level = frame.f_back, level + 1
    return level
