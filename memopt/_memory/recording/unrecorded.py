"""A context that keeps memopt's own work on a recording out of the recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import _disable_current_modes

from memopt import _C


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Keep this thread's allocations within the context out of every recording of the CPU."""
    _C.cpu_log_pause()
    try:
        with _disable_current_modes():
            yield
    finally:
        _C.cpu_log_resume()
