"""What looks at a recording is not recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import _disable_current_modes

from memopt import _C


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """What this thread asks for within is in no recording of the CPU."""
    _C.cpu_log_pause()
    try:
        with _disable_current_modes():
            yield
    finally:
        _C.cpu_log_resume()
