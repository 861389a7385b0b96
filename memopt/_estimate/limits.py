"""Limits on a script under an estimate: another batch size, and a time limit in seconds."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.utils.data as torch_data

from memopt._estimate.watch import Stopped

_GRACE = 20.0  # seconds in which a script that was stopped may unwind


class BatchSizeOverride:
    """Patch DataLoader so that each loader gives batches of this size. `loaders`: number of loaders changed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaders = 0
        loader = torch_data.DataLoader
        loader.__init__ = self._given_to(loader.__init__)  # type: ignore[method-assign]

    def _given_to(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(loader: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            sampler = args[2] if len(args) > 2 else kwargs.get("batch_sampler")
            if sampler is not None and hasattr(sampler, "batch_size"):
                sampler.batch_size = self.size
                self.loaders += 1
            elif sampler is None and batch_size is not None:
                batch_size = self.size
                self.loaders += 1
            original(loader, dataset, batch_size, *args, **kwargs)

        return init


class TimeLimit:
    """A time limit: after so many seconds the main thread raises Stopped.

    If it does not react, because it waits in C, `late` is called in this thread.
    """

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        thread = threading.Thread(target=self._wait, args=(seconds, late), daemon=True)
        thread.start()

    def end(self) -> None:
        """The script has ended before."""
        self._over.set()

    def _wait(self, seconds: float, late: Callable[[], None]) -> None:
        if self._over.wait(seconds):
            return
        raised = ctypes.py_object(_OutOfTime)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), raised)
        if not self._over.wait(_GRACE):
            late()


class _OutOfTime(Stopped):
    """A class, not an exception: CPython raises it without arguments."""

    def __init__(self) -> None:
        super().__init__("seconds")
