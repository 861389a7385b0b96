"""Exceptions that say that memory ran out, the device's or the host's, whatever raised them; and the frames of
tracebacks, which hold the locals of functions that have ended.
"""

from __future__ import annotations

import errno
import gc
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator

# Libraries that allocate for themselves have no exception of their own: what reaches Python is torch's RuntimeError
# with their status in it.
_WORDS = (
    "out of memory",  # torch's of every device, CUDA's own ("CUDA error: out of memory"), MPS's
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on Windows
    "Cannot allocate memory",  # errno's, where torch maps a file
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # its handle takes memory, and says no more than this
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # torch tries cuDNN's plans one after another, passes over those whose workspace it cannot have (aten's Conv_v8.cpp
    # catches the out-of-memory error), and says this when none is left.
    "was unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception is an out-of-memory error, or was raised while one was handled.

    Out-of-memory errors are torch.OutOfMemoryError, MemoryError, an OSError with ENOMEM, and the RuntimeErrors by which
    torch passes on what CUDA, cuBLAS, cuDNN and its CPU allocator report.

    An interrupt or an exit never counts, whatever it interrupted; nor does a collective's error, after which its
    process group cannot be used. All exceptions of a group must count.
    """
    return out_of_memory_in(error) is not None


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """Return the out-of-memory error that an exception is, was raised from, or was raised while handling; None without
    one."""
    for one in followed(error):
        if not isinstance(one, Exception) or _is_collectives(one):
            return None
        if _is_one(one):
            return one
    return None


def followed(error: BaseException | None, everything: bool = False) -> Iterator[BaseException]:
    """An exception, the one that it followed, and so on, as a traceback shows them. With `everything` also those that
    `raise … from` has hidden, and the members of groups: all that it keeps alive."""
    left, seen = [error], set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if everything:
            left += [*getattr(one, "exceptions", ()), one.__context__, one.__cause__]
        else:
            left.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))


def bytes_asked(error: BaseException) -> int | None:
    """Return the size of the request in an out-of-memory error's message, None where it names none.

    torch rounds the sizes in its CUDA messages to hundredths of the unit.
    """
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error))
    if found is None:
        return None
    return int(float(found[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(found[2]))


def _is_one(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, ExceptionGroup):
        return all(is_out_of_memory(one) for one in error.exceptions)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch = sys.modules.get("torch")  # without it, it cannot have raised anything
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(words in text for words in _WORDS)


def _is_collectives(error: Exception) -> bool:
    kind = getattr(getattr(sys.modules.get("torch"), "distributed", None), "DistError", None)
    return kind is not None and isinstance(error, kind)


# ---- frames of tracebacks --------------------------------------------------------------------------------------------


_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def empty_frames(error: BaseException | None) -> int:
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
    return sum(map(_empty_frame, found.values()))


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


def _empty_frame(frame: types.FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # it runs still: this very call is below it
        return False
    if (
        frame.f_code.co_flags & inspect.CO_OPTIMIZED
    ):  # a function's: the dict of its locals, if somebody asked for one, is made anew
        _ = frame.f_locals
    return True
