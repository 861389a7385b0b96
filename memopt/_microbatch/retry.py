"""A call that may run out of memory, and nothing left of it if it does."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from memopt._memory.oom import exceptions
from memopt._memory.oom.exceptions import bytes_asked, out_of_memory_in
from memopt._microbatch import available_memory
from memopt._runtime.log import logger


class Failure(NamedTuple):
    """An out-of-memory error's text and numbers, when the exception is gone.

    kind: the exception's class; asked: bytes of the request, where it is said; least: the bytes that would have let it
    pass, and of what.
    """

    kind: type[BaseException]
    text: str
    asked: int | None
    least: str

    def error(self, begin: str) -> BaseException:
        """To raise, of the same class, so that who expects one knows it."""
        kind = self.kind if self.kind in (torch.OutOfMemoryError, MemoryError) else RuntimeError
        return kind(f"{begin}{self.least}. The last failure was: {self.text}")


def run(call: Callable[[], object], devices: Iterable[torch.device]) -> Failure | None:
    """Call it. An out-of-memory error is returned as a Failure, after everything it held is free.

    The exception, whose traceback holds each frame of the call, and those their tensors, is gone by then, cycles are
    collected, and the allocator has given back what it had cached in the sizes of the call. Any other exception is
    raised.
    """
    try:
        call()
        return None
    except Exception as error:
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        failure = Failure(
            type(cause),
            str(cause) or type(cause).__name__,
            bytes_asked(cause),
            available_memory.least(cause, devices),
        )
        exceptions.empty_frames(error)
        del cause
    # Only here is the exception gone: within the handler the interpreter itself holds it.
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    logger.log(logging.INFO, "out of memory in a step: %s", failure.text.partition("\n")[0])
    return failure
