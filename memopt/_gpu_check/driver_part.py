"""The part `driver`: the time of the driver's calls, idle and beside a running kernel, and the card's first touch."""

from __future__ import annotations

import time
from collections.abc import Callable

from memopt import _C
from memopt._gpu_check import driver_calls
from memopt._gpu_check.part_outcome import Figures, PartOutcome, PartRequest, late_work, sleep_cycles

KERNEL_SECONDS = 0.02  # longer than any of these calls
SHARE = {True: 0.125, False: 0.9}  # of the free memory, by `quick`
# They are made while the device works; one that waits for a kernel stops the host.
MUST_NOT_WAIT = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuEventRecord", "cuEventQuery")


def driver(request: PartRequest) -> PartOutcome:
    if not _C.cuda_driver()["devices"][0]["virtual_memory"]:
        return PartOutcome("not here", "device 0 has no virtual memory management")
    figures: Figures = {}
    try:
        counts = driver_calls.COUNTS[:3] if request.quick else driver_calls.COUNTS
        rounds = 3 if request.quick else 7
        found = driver_calls.microseconds(rounds, counts)
        found |= driver_calls.microseconds(rounds, counts[:2], driver_calls.LARGE)
        figures |= {f"{name}, µs": value for name, value in found.items()}
        waiting = _beside_a_kernel(request, figures)
        calls = driver_calls.Driver()
        try:
            figures |= driver_calls.first_touch(calls, SHARE[request.quick or request.simulated])
        finally:
            calls.close()
    except RuntimeError as error:
        return PartOutcome("wrong", str(error), figures)
    if waiting:
        return PartOutcome("slow", f"calls wait for a running kernel: {', '.join(waiting)}", figures)
    return PartOutcome("ok", figures=figures)


def _beside_a_kernel(request: PartRequest, figures: Figures) -> list[str]:
    """Each call's time while a kernel runs on another stream, and those that end only after it."""
    import torch

    beside, cycles = torch.cuda.Stream(), sleep_cycles(KERNEL_SECONDS, request.simulated)
    waited: dict[str, bool] = {}

    def timed(seconds: dict[str, list[float]], what: str, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            torch.cuda._sleep(cycles)
        start = time.perf_counter()
        run()
        seconds.setdefault(what, []).append(time.perf_counter() - start)
        waited[what] = waited.get(what, True) and beside.query()

    calls = driver_calls.Driver()
    seconds: dict[str, list[float]] = {}
    try:
        with late_work(request.simulated):
            for _ in range(3):
                driver_calls.map_once(calls, 1, False, seconds, timed=timed)
                driver_calls.use_events(calls, 1, seconds, timed=timed)
            torch.cuda.synchronize()
    finally:
        calls.close()
    for name, times in seconds.items():
        figures[f"{name}, beside a kernel, µs"] = min(times) * 1e6
        figures[f"{name}, waits for a kernel"] = "yes" if waited[name] else "no"
    return [name for name in MUST_NOT_WAIT if waited[name]]
