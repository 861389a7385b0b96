"""The memopt logger, silent by default; and the user's line, for warnings.

MEMOPT_LOG=debug|info|warning|error, `-v` on a command, or the program's own logging configuration turn it on.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("memopt")
logger.addHandler(logging.NullHandler())

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def level_named(name: str) -> int:
    """A level by MEMOPT_LOG's word for it; ValueError, naming the choices, for any other."""
    try:
        return LEVELS[name.lower()]
    except KeyError:
        raise ValueError(f"MEMOPT_LOG={name} is not one of {', '.join(LEVELS)}") from None


def show(level: int) -> None:
    """Write messages of this level and above to standard error from now on. A second call changes the level."""
    if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("memopt: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def stacklevel() -> int:
    """Return the stacklevel for warnings.warn() in the calling function: the first caller outside memopt and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("memopt", "torch"):
        frame, level = frame.f_back, level + 1
    return level


if _asked := os.environ.get("MEMOPT_LOG"):
    try:
        show(level_named(_asked))
    except ValueError as _error:  # a typing error in the environment is no reason to stop a training run
        show(logging.WARNING)
        logger.warning("%s", _error)
