"""Replacement of torch's functions by memopt's of the same name, in every module that has imported them."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from memopt._runtime.log import logger

_lock = threading.Lock()
_done: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, torch's, ours


def _pairs() -> dict[int, tuple[Any, Any]]:
    """Return torch's functions and ours by the id of torch's, and of replacements by other code."""
    import torch.utils.checkpoint as torchs

    from memopt._checkpoint.drop_in import checkpoint, selective, sequential

    pairs = (
        (torchs.checkpoint, checkpoint.checkpoint),
        (torchs.checkpoint_sequential, sequential.checkpoint_sequential),
        (torchs.create_selective_checkpoint_contexts, selective.create_selective_checkpoint_contexts),
        (checkpoint.torchs_checkpoint, checkpoint.checkpoint),
        (sequential.torchs_sequential, sequential.checkpoint_sequential),
        (selective.torchs_contexts, selective.create_selective_checkpoint_contexts),
    )
    return {id(theirs): (theirs, ours) for theirs, ours in pairs if theirs is not ours}


def install() -> None:
    """Replace torch's functions in every loaded module that has them under some name."""
    with _lock:
        pairs = _pairs()
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "memopt":
                continue
            for name, value in list(vars(module).items()):
                if id(value) in pairs:
                    theirs, ours = pairs[id(value)]
                    setattr(module, name, ours)
                    _done.append((module, name, theirs, ours))
        logger.info(
            "torch's names bound to memopt's: %s", ", ".join(f"{m.__name__}.{n}" for m, n, *_ in _done)
        )


def remove() -> None:
    """Restore torch's functions, also in torch's own modules that have imported ours since.

    A replacement by other code stays.
    """
    with _lock:
        theirs_of = {id(ours): theirs for _, _, theirs, ours in _done}
        of_torch = (
            [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "torch"] if _done else []
        )
        for module in {id(m): m for m in (*(m for m, *_ in _done), *of_torch)}.values():
            if not isinstance(module, ModuleType):
                continue
            names = {name for m, name, *_ in _done if m is module}
            for name, value in list(vars(module).items()):
                if id(value) in theirs_of and (name in names or module in of_torch):
                    setattr(module, name, theirs_of[id(value)])
        _done.clear()
