"""Exceptions, and what the frames of their tracebacks hold: the locals of functions that have ended."""

from __future__ import annotations

import types
from collections.abc import Iterator

from memopt.oom.recognition import followed


def frames(error: BaseException) -> Iterator[types.FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def empty(error: BaseException | None) -> None:
    """Lets go what the frames of an exception hold, and those of all that it followed. Its text and its lines stay; a
    debugger finds no locals any more. Frames that run still are left as they are."""
    for frame in {
        id(frame): frame for one in followed(error, everything=True) for frame in frames(one)
    }.values():
        _empty(frame)


def _empty(frame: types.FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:  # it runs still: this very call is below it
        return
    if (
        frame.f_code.co_flags & 1
    ):  # a function's: the dict of its locals, if somebody asked for one, is made anew
        _ = frame.f_locals
