"""The frames of exceptions' tracebacks, which hold the locals of functions that have ended."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Iterable, Iterator

from memopt._memory.oom.recognition import followed

_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def empty(error: BaseException | None) -> int:
    """Clear the frames of an exception's traceback, and of all that it followed, and return their number.

    The exception's text and its traceback lines stay; a debugger finds no locals any more. Frames of functions that
    still run, or may continue (generators), are left as they are.
    """
    return empty_tracebacks(
        one.__traceback__ for one in followed(error, everything=True) if one.__traceback__ is not None
    )


def empty_tracebacks(tracebacks: Iterable[types.TracebackType]) -> int:
    """The same, of all the frames that these have."""
    found = {id(frame): frame for traceback in tracebacks for frame in _frames(traceback)}
    if any(frame.f_code.co_flags & _RESUMABLE for frame in found.values()):
        for suspended in _suspended():
            found.pop(suspended, None)
    return sum(map(_empty, found.values()))


def _frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _suspended() -> Iterator[int]:
    """Return frames of generators and coroutines that have not ended; up to Python 3.12 clearing one would end it."""
    for thing in gc.get_objects():
        for kind, name in _FRAME_OF.items():
            if type(thing) is kind:
                yield id(getattr(thing, name))


_FRAME_OF = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}


def _empty(frame: types.FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # it runs still: this very call is below it
        return False
    if (
        frame.f_code.co_flags & inspect.CO_OPTIMIZED
    ):  # a function's: the dict of its locals, if somebody asked for one, is made anew
        _ = frame.f_locals
    return True
