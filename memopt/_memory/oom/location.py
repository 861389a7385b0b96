"""The user's source line that was running when a request failed."""

from __future__ import annotations

import linecache
import sys
import threading
import types
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._memory.recording.user_code import is_users, place


class Location(NamedTuple):
    """The place in the program where a request failed.

    `phase`: "forward", "backward", "optimizer step", or "" for none of these. `rows`: first dimensions of the arguments
    of the outermost running module.
    """

    where: str  # "train.py:88"; empty where no line of the user's was running
    text: str  # of the line
    phase: str
    rows: frozenset[int] = frozenset()


def location() -> Location:
    """Return the location of this thread or, if it is autograd's, of the thread that waits for the backward pass."""
    stacks = {thread: _stack(frame) for thread, frame in sys._current_frames().items()}
    own = stacks.pop(threading.get_ident(), [])
    waiting = [stack for stack in stacks.values() if _phase(stack) == "backward"]
    stack = own if any(map(_is_users, own)) or not waiting else waiting[0]
    phase = "backward" if waiting and stack is waiting[0] else _phase(own)
    frame = next(filter(_is_users, stack), None)
    if frame is None:
        return Location("", "", phase, _rows(stack))
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Location(place(file, line), linecache.getline(file, line).strip(), phase, _rows(stack))


def _stack(frame: types.FrameType | None) -> list[types.FrameType]:
    """Return the stack, innermost frame first, without this package's own frames.

    A list that its own frame holds would keep everything in it alive.
    """
    found = []
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] != "memopt":
            found.append(frame)
        frame = frame.f_back
    return found


def _is_users(frame: types.FrameType) -> bool:
    return is_users(frame.f_code.co_filename)


_CALL = torch.nn.Module._call_impl
_PHASES = {
    ("torch.autograd.graph", "_engine_run_backward"): "backward",
    ("torch.nn.modules.module", "_call_impl"): "forward",
}


def _phase(stack: list[types.FrameType]) -> str:
    for frame in stack:
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if (module, function) in _PHASES:
            return _PHASES[module, function]
        if function == "step" and module.startswith(("torch.optim.", "memopt.optim.")):
            return "optimizer step"
    return ""


def _rows(stack: list[types.FrameType]) -> frozenset[int]:
    calls = [frame for frame in stack if frame.f_code is _CALL.__code__]
    if not calls:
        return frozenset()
    called = calls[-1].f_locals
    parts = pytree.tree_leaves((called["args"], called["kwargs"]))
    return frozenset(len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim() > 1)
