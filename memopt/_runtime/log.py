"""The memopt logger, silent by default.

MEMOPT_LOG=debug|info|warning|error, `-v` on a command, or the program's own logging configuration turn it on.
"""

from __future__ import annotations

import logging
import os

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


if _asked := os.environ.get("MEMOPT_LOG"):
    try:
        show(level_named(_asked))
    except ValueError as _error:  # a typing error in the environment is no reason to stop a training run
        show(logging.WARNING)
        logger.warning("%s", _error)
