"""A script run in this process as `python script.py` runs it: its end, its limits, its memory.

What measures allocates nothing on the device and holds no tensor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.data as torch_data

from memopt._memory.oom.exceptions import followed
from memopt._memory.recording.user_code import is_user_file
from memopt._run.user_program import run_as_main

_HERE = str(Path(__file__).resolve().parents[1])


class Stopped(BaseException):
    """Ends the script from within. It is not an Exception, so that `except Exception` lets it pass."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class End:
    """The end of a script.

    stopped: "end", "exit", "error", or the reason of Stopped. out_of_memory: the exception that ended it, or led to the
    one that did. where: the script's line at which it was stopped.
    """

    stopped: str
    status: int
    error: BaseException | None = None
    out_of_memory: torch.OutOfMemoryError | None = None
    where: str = ""


def run(argv: list[str], module: bool) -> End:
    """Run the script to its end; an exception is part of the result."""
    try:
        run_as_main(argv, module)
    except SystemExit as exit_:
        return End("exit", _status(exit_))
    except BaseException as error:
        return ended_by(error)
    return End("end", 0)


def ended_by(error: BaseException) -> End:
    if isinstance(error, Stopped):
        return End(error.why, 0, where=_where(traceback.extract_tb(error.__traceback__)))
    behind = (one for one in followed(error, everything=True) if isinstance(one, torch.OutOfMemoryError))
    return End("error", 1, error, next(behind, None))


def out_of_time() -> End:
    """Return the end of a script as it stands now, asked by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return End("seconds", 0, where=_where(traceback.extract_stack(frame)) if frame else "")


def _where(frames: Iterable[traceback.FrameSummary]) -> str:
    found = [frame for frame in frames if is_user_file(frame.filename)]
    return f"{Path(found[-1].filename).name}:{found[-1].lineno} ({found[-1].name})" if found else ""


def described(error: BaseException) -> str:
    """Describe an error, with a remedy if there is one that the error does not name."""
    text = f"{type(error).__name__}: {error}"
    if any(type(one).__name__ == "TritonMissing" for one in followed(error, everything=True)):
        text += (
            "\ntorch.compile needs triton on the simulated device too: install it (pip install triton) beside the "
            "torch that runs this, name another Python that has it with --python, or disable compilation "
            "(TORCH_COMPILE_DISABLE=1)"
        )
    return text


def _status(exit_: SystemExit) -> int:
    """Return the status with which the interpreter would end."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """The traceback, from the script's first line on."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen")):
        tb = tb.tb_next
    traceback.print_exception(type(error), error, tb)


# ---- limits ----------------------------------------------------------------------------------------------------------


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


# ---- its memory ------------------------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A request that the device could not serve."""

    asked: int
    allocated: int  # bytes of tensors at that moment
    gradients: bool  # are recorded


class AllocatedMemory(NamedTuple):
    """Memory of the current device: bytes and blocks that are allocated, and the number of blocks ever allocated."""

    bytes: int
    blocks: int
    ever: int


def memory() -> AllocatedMemory:
    if not torch.cuda.is_initialized():
        return AllocatedMemory(0, 0, 0)
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocation.all.current", "allocation.all.allocated"
    return AllocatedMemory(*(stats.get(name, 0) for name in names))


def requested() -> tuple[int, int]:
    """Return the bytes that the current device's tensors asked for, of those that are there, and of all that were."""
    if not torch.cuda.is_initialized():
        return 0, 0
    stats = torch.cuda.memory_stats()
    return stats.get("requested_bytes.all.current", 0), stats.get("requested_bytes.all.allocated", 0)


def growth(seen: list[AllocatedMemory]) -> int:
    """Return the bytes that each iteration adds once the loop's variables exist; 0 if some iteration adds no blocks."""
    steps = [
        (after.bytes - before.bytes, after.blocks - before.blocks)
        for before, after in itertools.pairwise(seen)
    ]
    last = steps[-2:]
    return min(size for size, _ in last) if len(last) == 2 and min(map(min, last)) > 0 else 0


class Requests:
    """Failed requests. The allocator reports them while everything allocated is still alive."""

    def __init__(self) -> None:
        self.failed: list[Failed] = []
        # The allocator knows observers once CUDA is initialised, which is the script's business.
        torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(self._tell))

    def _tell(self, device: int, asked: int, total: int, free: int) -> None:
        allocated = torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0)
        self.failed.append(Failed(asked, allocated, torch.is_grad_enabled()))
