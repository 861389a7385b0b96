"""Figures of the memory that are cheap to read while a program runs: nothing waits for the device."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memopt import _C
from memopt._runtime.host_memory import Limit, limit_of, resident_bytes

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass(frozen=True)
class Figures:
    """Bytes. live: of tensors, and the peak of that; reserved: by the allocator; used, of total: of the device, by its
    driver, or this process's part of the host's memory. Of the host, live and peak are 0 where nothing is recorded."""

    device: str
    live: int
    peak: int
    reserved: int
    used: int
    total: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FiguresReader:
    """read() returns the figures of the CUDA device with the most live bytes, of the host where CUDA is not in use.

    For one thread of its own. The peak is that of all reads and allocations, whatever the program resets.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._limit: Limit | None = None
        self._relaxed = False

    def read(self) -> Figures:
        return self._cuda() if torch.cuda.is_initialized() else self._host()

    def _cuda(self) -> Figures:
        if not self._relaxed:
            _let_captures_be()
            self._relaxed = True
        stats = {n: torch.cuda.memory_stats_as_nested_dict(n) for n in range(torch.cuda.device_count())}
        live = {n: told["allocated_bytes"]["all"] for n, told in stats.items()}
        index = max(live, key=lambda n: live[n]["current"])
        name = f"cuda:{index}"
        free, total = torch.cuda.mem_get_info(index)
        return Figures(
            name,
            live[index]["current"],
            self._peak(name, live[index]["peak"]),
            stats[index]["reserved_bytes"]["all"]["current"],
            total - free,
            total,
        )

    def _host(self) -> Figures:
        self._limit = self._limit or limit_of()
        live, peak = _C.cpu_log_live(False)
        return Figures("cpu", live, self._peak("cpu", peak), 0, resident_bytes(), self._limit.size or 0)

    def _peak(self, name: str, peak: int) -> int:
        self._peaks[name] = max(peak, self._peaks.get(name, 0))
        return self._peaks[name]


def _let_captures_be() -> None:
    """Have this thread's calls of CUDA pass while another one captures a graph, and leave that capture valid."""
    with contextlib.suppress(OSError, AttributeError):  # ROCm's torch has another driver
        mode = ctypes.c_int(_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class FiguresThread:
    """A thread that tells the figures at an interval in seconds, and once more at its end, which end() brings."""

    def __init__(self, tell: Callable[[Figures], None], interval: float = 0.25) -> None:
        self._tell, self._interval = tell, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memopt live", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        reader = FiguresReader()
        with contextlib.suppress(RuntimeError):  # CUDA has failed, as the program will hear of itself
            ended = False
            while not ended:
                ended = self._ended.wait(self._interval)
                self._tell(reader.read())
