"""The request to a part of `memopt gpu-check`, its outcome, and what several parts need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from memopt import _C
from memopt._gpu_check import processes
from memopt._gpu_check.check_report import Status
from memopt._runtime import process

CHILD_SECONDS = 300.0
ROOMY = 32 << 30  # bytes free on the device, for the sizes of --full; the others take 2 GiB

Figures = dict[str, float | int | str]


class PartOutcome(NamedTuple):
    status: Status
    text: str = ""
    figures: Figures = {}  # noqa: RUF012 (never changed)


class PartRequest(NamedTuple):
    """A part to run; contender, folder and loops: what a part tells the processes that it starts itself."""

    part: str
    quick: bool
    simulated: bool
    contender: str = ""
    folder: str = ""
    loops: Sequence[str] = ()


# Adds to the figures, and returns what is wrong, '' for nothing.
Check = Callable[[PartRequest, Figures], str]


def run_checks(checks: Mapping[str, Check], request: PartRequest, figures: Figures) -> PartOutcome:
    """Run all checks, also behind one that is wrong or raises an error."""
    wrong = []
    for name, check in checks.items():
        try:
            said = check(request, figures)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if said:
            wrong.append(f"{name}: {said}")
    return PartOutcome("wrong" if wrong else "ok", "; ".join(wrong), figures)


def ask_child(
    request: PartRequest, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Return the figures that another process of a part finds, and what is wrong with the process."""
    with process.Children() as children:
        child = children.start(
            processes.MODULE, request=request._asdict(), environment={**os.environ, **(environment or {})}
        )
        return heard(child)


def heard(child: process.Child) -> tuple[dict[str, Any], str]:
    """Return the figures of a process that was started, and what is wrong with it; its end counts too."""
    try:
        answer = child.hear(CHILD_SECONDS)
    except TimeoutError as error:
        return {}, str(error)
    if answer is None or answer.kind != "finding":
        return {}, child.said(1)
    child.wait(CHILD_SECONDS)
    status = child.end()
    return answer.what["figures"], f"the process {process.ended(status)} after its answer" if status else ""


def use_memopts_allocator() -> None:
    """Make memopt's allocator torch's, unless this process has used another."""
    import torch

    from memopt import cuda

    if not _C.allocator_is_current() and not torch.cuda.is_initialized():
        torch.cuda.memory.change_current_allocator(cuda.allocator())


@contextmanager
def late_work(simulated: bool) -> Iterator[None]:
    """Copies alone within the block, which are real on the simulated device without the host's help. There they are
    done when somebody waits for them, so that work is queued as on a GPU."""
    if not simulated:
        yield
        return
    from torch.utils._python_dispatch import _disable_current_modes

    from memopt import sim

    sim.lazy(True)
    try:
        with _disable_current_modes():
            yield
    finally:
        sim.lazy(False)


def sleep_cycles(seconds: float, simulated: bool) -> int:
    """The argument of torch.cuda._sleep for a kernel that runs so long; the simulated device has no clock."""
    import torch

    if simulated:
        return 1 << 20
    cycles, taken = 1 << 20, 0.0
    while taken < 0.02:
        cycles *= 4
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
    return int(cycles * seconds / taken)
