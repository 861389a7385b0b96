"""The part `allocator`: nine training loops under each allocator, and memopt's at the edges of its contract.

The losses of a loop must have the same bits under all of them: no kernel may read or write another tensor's memory."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt._gpu_check import driver_calls
from memopt._gpu_check.part_outcome import (
    ROOMY,
    Figures,
    PartOutcome,
    PartRequest,
    ask_child,
    late_work,
    run_checks,
    sleep_cycles,
    use_memopts_allocator,
)

if TYPE_CHECKING:
    import torch

    from memopt._gpu_check.workloads import Workload

HELD, FRONTIER, STEP = "bytes held at the end", "smallest budget over the live peak", "milliseconds a step"
LIVE = "live peak, bytes"
# By name: what torch's own allocator is configured with, and double_map of memopt's.
CONTENDERS: dict[str, tuple[str, bool | None]] = {
    "native": ("expandable_segments:False", None),
    "expandable": ("expandable_segments:True", None),
    "memopt": ("", None),
    "memopt, one address": ("", False),
}
QUICK = ("gpt_varlen", "unet", "two_streams")
TRIALS = 5  # of a budget: an answer within 1/32 of what a loop holds beyond its live peak
# A loop that takes so much longer than under torch's allocator, or needs so much more, is slow.
SLOW_STEP, SLOW_FRONTIER = 1.15, 1.01
FEW = 16 << 20  # bytes, some granules: needed beyond native's, they are not slow
QUEUED_SECONDS = 3.0  # of work that a request waits for


def allocator(request: PartRequest) -> PartOutcome:
    """The loops under each allocator, in other processes, then memopt's at its edges in this process."""
    from memopt._gpu_check.workloads import WORKLOADS

    names = list(QUICK if request.quick else WORKLOADS)
    # memopt's allocator lets itself hold what an earlier loop needed, so that --full has a process a loop.
    shares = [names] if request.quick else [[name] for name in names]
    figures: Figures = {}
    losses: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for contender, (settings, _) in CONTENDERS.items():
        environment = {
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "PYTORCH_ALLOC_CONF": settings,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in the same order
        }
        for share in shares:
            child = request._replace(part="loop", contender=contender, loops=tuple(share))
            found, said = ask_child(child, environment)
            if said:
                return PartOutcome("wrong", f"{contender}: {said}", figures)
            for name, of_loop in found.items():
                losses[name][contender] = of_loop.pop("losses")
                figures.update({f"{name}, {contender}: {key}": value for key, value in of_loop.items()})
    loops = judged(losses, figures, request.simulated)
    use_memopts_allocator()
    with late_work(request.simulated):
        edges = run_checks(EDGES, request, figures)
    if edges.status == loops.status == "wrong":
        return edges._replace(text=f"{loops.text}; {edges.text}")
    return edges if edges.status == "wrong" else loops


def judged(losses: dict[str, dict[str, list[float]]], figures: Figures, simulated: bool) -> PartOutcome:
    """losses: of each loop, by allocator."""
    others = [
        f"{name}, {contender}"
        for name, found in losses.items()
        for contender in found
        if found[contender] != found["native"]
    ]
    if others:
        return PartOutcome(
            "wrong", f"other losses than under torch's allocator: {'; '.join(others)}", figures
        )
    ours = [(name, contender) for name in losses for contender in CONTENDERS if "memopt" in contender]
    kept = [f"{name}, {contender}" for name, contender in ours if figures[f"{name}, {contender}: {HELD}"]]
    if kept:
        return PartOutcome("wrong", f"memory is held after the end of a loop: {'; '.join(kept)}", figures)

    def more(name: str, contender: str, figure: str, factor: float) -> bool:
        key = f"{name}, {contender}: {figure}"
        if key not in figures or (simulated and figure == STEP):
            return False
        mine, native = float(figures[key]), float(figures[f"{name}, native: {figure}"])
        few = FEW / float(figures[f"{name}, native: {LIVE}"]) if figure == FRONTIER else 0.0
        return mine > factor * native and mine > native + few

    slow = [
        f"{name}, {contender}, {figure}"
        for figure, factor in ((STEP, SLOW_STEP), (FRONTIER, SLOW_FRONTIER))
        for name, contender in ours
        if more(name, contender, figure, factor)
    ]
    if slow:
        return PartOutcome("slow", f"more than under torch's allocator: {'; '.join(slow)}", figures)
    return PartOutcome("ok", figures=figures)


# ---- the loops -------------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    losses: list[float]
    milliseconds: float  # of a step of the later half
    host_waits: float  # a step of the later half, as the next
    driver_calls: float


def loop(request: PartRequest) -> dict[str, Any]:
    """Some of the loops one after the other under one allocator. The host runs ahead of the device."""
    import torch

    import memopt
    from memopt._gpu_check.workloads import WORKLOADS

    settings, double_map = CONTENDERS[request.contender]
    if not settings:
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(double_map=double_map))
    torch.use_deterministic_algorithms(True)
    scale, steps = 1.0 if torch.cuda.mem_get_info()[0] > ROOMY else 0.5, None
    if request.quick or request.simulated:
        scale, steps = (1 / 16, 4) if request.simulated else (1 / 4, 16)
    found: dict[str, Any] = {}
    for name in request.loops:
        train = partial(_train, WORKLOADS[name], scale, steps or WORKLOADS[name].steps)
        torch.cuda.reset_peak_memory_stats()
        done = train()
        stats = torch.cuda.memory_stats()
        live, held = stats["requested_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        found[name] = {
            "losses": done.losses,
            STEP: done.milliseconds,
            LIVE: live,
            "held, bytes": held,
            "held over the live peak": held / live,
            "host waits a step": done.host_waits,
            "driver calls a step": done.driver_calls,
        }
        if not request.quick:
            found[name][FRONTIER] = _frontier(train, live, held) / live
        _empty()
        found[name]["live bytes at the end"] = torch.cuda.memory_allocated()
        found[name][HELD] = torch.cuda.memory_stats()["reserved_bytes.all.current"]
    _until_the_end.append(_block(1 << 20))
    return found


_until_the_end: list[torch.Tensor] = []  # freed when the interpreter has ended


def _train(workload: Workload, scale: float, steps: int) -> Training:
    """A run of a loop; its losses are what backward() is called on."""
    import torch

    losses: list[torch.Tensor] = []
    marks: list[tuple[float, int, int]] = []
    backward = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *given: Any, **named: Any) -> None:
        losses.append(loss.detach())
        backward(loss, *given, **named)

    def step_done(step: int) -> None:
        if step in (steps // 2 - 1, steps - 1):
            torch.cuda.synchronize()
            marks.append((time.perf_counter(), *_costs()))

    torch.Tensor.backward = recorded
    try:
        workload.run(step_done, scale, steps)
    finally:
        torch.Tensor.backward = backward
    seconds, waits, calls = (
        (after - before) / (steps - steps // 2) for before, after in zip(*marks, strict=True)
    )
    return Training([float(loss) for loss in losses], seconds * 1e3, waits, calls)


def _costs() -> tuple[int, int]:
    """Host waits and driver calls on memory so far, as the current allocator counts them."""
    import torch

    from memopt import cuda

    if _C.allocator_is_current():
        ours = cuda.memory_stats()
        return ours["host_waits"], ours["driver_calls"]
    stats = torch.cuda.memory_stats()
    return stats["num_sync_all_streams"], stats["num_device_alloc"] + stats["num_device_free"]


def _frontier(train: Callable[[], object], low: int, high: int) -> int:
    """The least memory, of a few that are tried between both, in which the training completes."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    for _ in range(TRIALS):
        _empty()
        middle = (low + high) // 2
        torch.cuda.set_per_process_memory_fraction(middle / total)
        try:
            train()
            high = middle
        except torch.OutOfMemoryError:
            low = middle
    torch.cuda.set_per_process_memory_fraction(1.0)
    return high


def _empty() -> None:
    import torch

    from memopt.sim._activation import wait_for_workers

    wait_for_workers(2.0)  # autograd's threads drop a graph's tensors after backward() has returned or failed
    gc.collect()  # what a training that has failed leaves
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# ---- the edges -------------------------------------------------------------------------------------------------------


def _size(request: PartRequest) -> int:
    """Bytes of a block: larger than several granules of any card."""
    return 16 << 20 if request.simulated else 256 << 20


def _block(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _filled(nbytes: int, value: int) -> torch.Tensor:
    import torch

    block = _block(nbytes)
    block.copy_(torch.full((nbytes,), value, dtype=torch.uint8))
    return block


def _holds(block: torch.Tensor, value: int) -> bool:
    return bool((block.cpu() == value).all())


@contextmanager
def _limit(nbytes: int) -> Iterator[None]:
    """No more physical memory than that for this process."""
    import torch

    _empty()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(request: PartRequest, figures: Figures) -> str:
    """A request that does not fit is torch's error, whose text names remedies, and the next one that fits is served."""
    import torch

    size = _size(request)
    with _limit(2 * size):
        held = _block(3 * size // 2)
        try:
            _block(size)
        except RuntimeError as error:
            kind, text = type(error), str(error)
        else:
            return f"{size} bytes were served beyond a limit"
        del held
        _block(size)
    figures["out-of-memory error"] = text.partition("\n")[0]
    if kind is not torch.OutOfMemoryError:
        return f"the error is a {kind.__name__}, not torch.OutOfMemoryError"
    if not text.startswith("CUDA out of memory. Tried to allocate") or "What would help" not in text:
        return f"the error's text names no remedy: {text}"
    return ""


def queued_work(request: PartRequest, figures: Figures) -> str:
    """A request that only memory of queued work can serve is served, however long that work takes."""
    import torch

    size = _size(request)
    ones, twos = _filled(size, 1), _filled(size, 2)
    with _limit(2 * size + size + size // 4):
        cycles, beside = sleep_cycles(QUEUED_SECONDS, request.simulated), torch.cuda.Stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(beside):
            pieces = [_block(size // 4) for _ in range(4)]
            begin.record()
            torch.cuda._sleep(cycles)
            for piece in pieces:
                piece.copy_(ones[: size // 4], non_blocking=True)
            end.record()
        kept = pieces[1::2]
        del piece, pieces
        start = time.perf_counter()
        large = _block(size // 2 + size // 8)  # more than is free: of two pieces that lie apart
        seconds = time.perf_counter() - start
        large.copy_(twos[: large.numel()], non_blocking=True)
        torch.cuda.current_stream().synchronize()  # alone: what it does not wait for comes behind it
        torch.cuda.synchronize()
        figures["queued work, s"] = begin.elapsed_time(end) * 1e-3
        figures["request that needs its memory, s"] = seconds
        right = _holds(large, 2) and all(_holds(piece, 1) for piece in kept)
    return "" if right else "memory was given away while queued work still wrote to it"


def captured_graph(request: PartRequest, figures: Figures) -> str:
    """A captured graph keeps its memory, also of tensors that died within the capture: replays give right values."""
    import torch

    size = _size(request) // 4
    source, graph = _filled(size, 1), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        between = torch.empty_like(source)
        between.copy_(source)
        target = torch.empty_like(source)
        target.copy_(between)
        del between
    for value in (3, 4):
        source.copy_(torch.full((size,), value, dtype=torch.uint8))
        others = [_filled(size, 9) for _ in range(3)]
        graph.replay()
        torch.cuda.synchronize()
        if not _holds(target, value) or not all(_holds(other, 9) for other in others):
            return "a replay gives wrong values, or overwrites other tensors"
    return ""


def foreign_stream(request: PartRequest, figures: Figures) -> str:
    """Memory that a stream of another library uses is nobody else's before, also once that stream is destroyed."""
    import torch

    size, cycles = _size(request), sleep_cycles(0.05, request.simulated)
    driver = driver_calls.Driver()
    try:
        ones, twos, target = _filled(size, 1), _filled(size, 2), _filled(size, 0)
        with _limit(4 * size + size // 4):
            handle = ctypes.c_void_p()
            driver("cuStreamCreate", ctypes.byref(handle), 1)
            foreign = torch.cuda.ExternalStream(handle.value)
            block = _block(size)
            block.copy_(ones, non_blocking=True)
            foreign.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(foreign):
                torch.cuda._sleep(cycles)
                target.copy_(block, non_blocking=True)
            block.record_stream(foreign)
            del block
            driver("cuStreamDestroy_v2", handle)
            other = _block(size)
            other.copy_(twos, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            torch.cuda.synchronize()
            right = _holds(target, 1) and _holds(other, 2)
    finally:
        driver.close()
    return "" if right else "a destroyed stream's block was written before its last use"


def forked_child(request: PartRequest, figures: Figures) -> str:
    """A forked child may free its tensors, read statistics and end; the parent goes on."""
    from memopt import cuda

    held: list[torch.Tensor] = [_block(1 << 20)]
    child = os.fork()
    if child == 0:
        try:
            held.clear()
            cuda.memory_stats()
        except BaseException:
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + 60
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "a forked child does not end"
        time.sleep(0.01)
    figures["exit status of a forked child"] = os.waitstatus_to_exitcode(status)
    held.append(_block(1 << 20))
    return "" if status == 0 else f"a forked child ends with {os.waitstatus_to_exitcode(status)}"


def second_device(request: PartRequest, figures: Figures) -> str:
    import torch

    if torch.cuda.device_count() < 2:
        figures["second device"] = "not here: one GPU"
        return ""
    numbers = torch.arange(1 << 20)
    there = numbers.to("cuda:0").to("cuda:1")
    figures["second device"] = "yes"
    return "" if torch.equal(there.cpu(), numbers) else "values that went from device 0 to 1 are others"


def given_back(request: PartRequest, figures: Figures) -> str:
    """Rounds of requests and frees leave the device as free as it was."""
    driver, draw = driver_calls.Driver(), random.Random(3)
    free = []
    try:
        for _ in range(6):
            churn(_size(request), draw)
            _empty()
            free.append(driver.free_bytes())
    finally:
        driver.close()
    figures["bytes that are not given back"] = max(0, free[0] - free[-1])
    if driver_calls.shrinks(free):
        return f"{free[0] - free[-1]} bytes of the device are not free again after {len(free) - 1} rounds"
    return ""


def churn(size: int, draw: random.Random) -> None:
    live: list[torch.Tensor] = []
    for _ in range(40):
        live.append(_block(draw.randrange(1, size)))
        if len(live) > 4:
            del live[draw.randrange(len(live))]


EDGES = {
    "out of memory": out_of_memory,
    "queued work": queued_work,
    "captured graph": captured_graph,
    "foreign stream": foreign_stream,
    "fork": forked_child,
    "second device": second_device,
    "handles": given_back,
}
