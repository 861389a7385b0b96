"""The parts of `memopt gpu-check`: a function each, of which a process that processes.py has started runs one."""

from __future__ import annotations

import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt._gpu_check.check_report import Status
from memopt._gpu_check.processes import MODULE
from memopt._runtime import process

if TYPE_CHECKING:
    import torch

SIMULATED_MEMORY = "2GiB"
# Relative: of the norm of all gradients, whose sum the device makes in another order.
NORM_ERROR = 1e-6
# A kernel that reaches less of a copy's bandwidth is slow: the kernels are built to be bound by memory.
SLOW = 0.7
# The prediction's difference from the measured peak, as a part of that.
ESTIMATE_ERROR = 0.05
LOOP_SECONDS = 300.0
ROOMY = 32 << 30  # bytes free on the device, for the sizes of --full; the others take 2 GiB

Figures = dict[str, float | int | str]


class PartOutcome(NamedTuple):
    status: Status
    text: str = ""
    figures: Figures = {}  # noqa: RUF012 (never changed)


class PartRequest(NamedTuple):
    part: str
    quick: bool
    simulated: bool
    contender: str = ""


# ---- environment -----------------------------------------------------------------------------------------------------


def environment(request: PartRequest) -> PartOutcome:
    try:
        driver = _C.cuda_driver()
    except _C.Error as error:
        return PartOutcome("not here", str(error))
    if not driver["devices"]:
        return PartOutcome("not here", "the CUDA driver sees no GPU")
    import torch

    from memopt._runtime.doctor import doctor

    found: Figures = {
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "driver's CUDA": driver["version"],
    }
    if driver["lacking"]:
        found["functions that the driver lacks"] = ", ".join(driver["lacking"])
    for number, device in enumerate(driver["devices"]):
        found[f"device {number}"] = f"{device['name']}, compute capability {device['compute_capability']}"
        found[f"device {number}, bytes"] = device["total_bytes"]
        found[f"device {number}, virtual memory management"] = "yes" if device["virtual_memory"] else "no"
    if not torch.cuda.is_available():
        return PartOutcome("wrong", "torch sees no GPU although the driver does: is it a CPU build?", found)
    broken = [finding for finding in doctor().findings if finding.state == "broken"]
    if broken:
        return PartOutcome(
            "wrong", "; ".join(f"{finding.topic}: {finding.text}" for finding in broken), found
        )
    return PartOutcome("ok", figures=found)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernels(request: PartRequest) -> PartOutcome:
    """The optimizers' kernels equal the CPU's loops in bits, whatever the sizes and alignments; the norm is right."""
    import torch

    from memopt import amp, optim

    seed, rounds = 20, 4 if request.quick else 40
    draw = random.Random(seed)
    cases: list[tuple[str, Callable[[Any], torch.optim.Optimizer]]] = [
        ("AdamW", lambda params: optim.AdamW(params, lr=1e-2)),
        ("AdamW, 8-bit states", lambda params: optim.AdamW(params, lr=1e-2, state_bits=8)),
        ("SGD, momentum", lambda params: optim.SGD(params, lr=1e-2, momentum=0.9)),
    ]
    compared, furthest = 0, 0.0
    for number in range(rounds):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = [_drawn(draw, seed + number + i) for i in range(6)]
            for name, make in cases:
                here, there = (_trained(make, values, dtype, device) for device in ("cpu", "cuda"))
                compared += sum(tensor.numel() for tensor in here)
                if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(here, there, strict=True)):
                    return PartOutcome(
                        "wrong", f"{name}, {dtype}, seed {seed + number}: other bits than the CPU's loops"
                    )
            params = [torch.nn.Parameter(value.to("cuda", dtype)) for value in values]
            for param, value in zip(params, values, strict=True):
                param.grad = value.to("cuda", dtype)
            norm = float(amp.clip_grad_norm_(params, math.inf))
            right = math.sqrt(sum(float(value.to(dtype).double().square().sum()) for value in values))
            furthest = max(furthest, abs(norm - right) / right)
    state = _C.kernel_status()
    figures: Figures = {
        "values compared": compared,
        "largest relative error of the norm": furthest,
        "kernels from": state["origin"],
        "architecture": state["architecture"],
        "note": state["note"],
    }
    if furthest > NORM_ERROR:
        return PartOutcome("wrong", f"the gradients' norm is off by {furthest:.1e} of itself", figures)
    return PartOutcome("ok", figures=figures)


def _drawn(draw: random.Random, seed: int) -> torch.Tensor:
    """Values on the CPU: a view that begins anywhere in its storage."""
    import torch

    size, before = int(2 ** draw.uniform(0, 15)), draw.randrange(8)
    return torch.randn(before + size, generator=torch.Generator().manual_seed(seed))[before:]


def _trained(
    make: Callable[[Any], torch.optim.Optimizer], values: list[torch.Tensor], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """The parameters and their states after three steps, on the CPU."""
    import torch

    params = []
    for value in values:
        storage = torch.empty(value.storage_offset() + value.numel(), dtype=dtype, device=device)
        part = storage[value.storage_offset() :]
        part.copy_(value.to(dtype))
        params.append(torch.nn.Parameter(part))
    optimizer = make(params)
    for step in range(3):
        for param, value in zip(params, values, strict=True):
            param.grad = (value * (0.1 + step)).to(dtype).to(device)
        optimizer.step()
    states = [
        s
        for param in params
        for _, s in sorted(optimizer.state[param].items())
        if isinstance(s, torch.Tensor)
    ]
    return [tensor.detach().cpu() for tensor in (*params, *states)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---- aliasing --------------------------------------------------------------------------------------------------------


def aliasing(request: PartRequest) -> PartOutcome:
    """The allocator's own test of each device: whether what is written by one of two addresses is read by the other."""
    import torch

    from memopt import cuda

    torch.cuda.memory.change_current_allocator(cuda.allocator(double_map=None))
    figures: Figures = {}
    incoherent = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is off is said here
        for number in range(torch.cuda.device_count()):
            torch.empty(1, device=number)
            found = _C.allocator_double_map(number)
            assert found is not None
            on, tested, why = found
            incoherent |= tested and not on
            figures[f"device {number}"] = (
                "on" if on else f"off: {why}" if tested else "no virtual memory management"
            )
    text = "; ".join(f"{name}: {value}" for name, value in figures.items() if value != "on")
    status: Status = "wrong" if incoherent else "not here" if text else "ok"
    return PartOutcome(status, text, figures)


# ---- streams ---------------------------------------------------------------------------------------------------------


def streams(request: PartRequest) -> PartOutcome:
    """Memory that goes from stream to stream is not written while another stream still reads it."""
    import torch

    from memopt import cuda

    torch.cuda.memory.change_current_allocator(cuda.allocator())
    rounds, size = (200, 1 << 12) if request.simulated else (2000, 1 << 22)
    draw, seed = random.Random(9), 9
    several = [torch.cuda.Stream() for _ in range(3)]
    live: list[torch.Tensor] = []
    wrong = torch.zeros(rounds, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for number in range(rounds):
        writer, reader = draw.sample(several, 2)
        with torch.cuda.stream(writer):
            written = torch.empty(draw.randrange(size // 2, size), dtype=torch.int64, device="cuda")
            written.fill_(number)
        reader.wait_stream(writer)
        with torch.cuda.stream(reader):
            for _ in range(draw.randrange(4)):  # so that what is read is read late
                written.sum()
            wrong[number].copy_((written != number).sum())
        written.record_stream(reader)
        live.append(written)
        del written
        while len(live) > draw.randrange(8):
            live.pop(draw.randrange(len(live)))
    torch.cuda.synchronize()
    bad = int((wrong != 0).sum())
    live.clear()
    torch.cuda.empty_cache()
    figures: Figures = {"blocks that were read by another stream": rounds, "seed": seed}
    if bad:
        return PartOutcome(
            "wrong", f"{bad} of {rounds} blocks were written while another stream still read them", figures
        )
    return PartOutcome("ok", figures=figures)


# ---- driver ----------------------------------------------------------------------------------------------------------


def driver(request: PartRequest) -> PartOutcome:
    from memopt._gpu_check import driver_calls

    try:
        counts = driver_calls.COUNTS[:3] if request.quick else driver_calls.COUNTS
        found = driver_calls.microseconds(3 if request.quick else 7, counts)
    except RuntimeError as error:
        return PartOutcome("wrong", str(error))
    return PartOutcome("ok", figures={f"{name}, µs": value for name, value in found.items()})


# ---- allocator -------------------------------------------------------------------------------------------------------

_LEFT = "bytes held at the end"
# By name: what torch's own allocator is configured with, and double_map of memopt's.
CONTENDERS: dict[str, tuple[str, bool | None]] = {
    "native": ("expandable_segments:False", None),
    "expandable": ("expandable_segments:True", None),
    "memopt": ("", None),
    "memopt, one address": ("", False),
}


def allocator(request: PartRequest) -> PartOutcome:
    """One loop under each allocator, a process each: the losses are equal in bits, and memory and time are compared."""
    figures: Figures = {}
    losses: dict[str, list[float]] = {}
    for name, (settings, _) in CONTENDERS.items():
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "PYTORCH_ALLOC_CONF": settings,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in the same order
        }
        with process.Children() as children:
            child = children.start(
                MODULE,
                request=request._replace(part="loop", contender=name)._asdict(),
                environment=environment,
            )
            try:
                answer = child.hear(LOOP_SECONDS)
            except TimeoutError as error:
                return PartOutcome("wrong", f"{name}: {error}", figures)
            if answer is None or answer.kind != "finding":
                return PartOutcome("wrong", f"{name}: {child.said(1)}", figures)
        found = answer.what["figures"]
        losses[name] = found.pop("losses")
        figures.update({f"{name}: {key}": value for key, value in found.items()})
    return _judged(losses, figures)


def _judged(losses: dict[str, list[float]], figures: Figures) -> PartOutcome:
    others = [name for name in losses if losses[name] != losses["native"]]
    if others:
        return PartOutcome(
            "wrong", f"other losses than under torch's allocator: {', '.join(others)}", figures
        )
    kept = [name for name in CONTENDERS if "memopt" in name and figures[f"{name}: {_LEFT}"]]
    if kept:
        return PartOutcome(
            "wrong", f"memory is held although no tensor lives any more: {', '.join(kept)}", figures
        )
    return PartOutcome("ok", figures=figures)


def loop(request: PartRequest) -> dict[str, Any]:
    """Training of batches of varying length under one allocator. The host runs ahead of the device."""
    import torch

    import memopt

    settings, double_map = CONTENDERS[request.contender]
    if not settings:
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator(double_map=double_map))
    torch.use_deterministic_algorithms(True)
    roomy = torch.cuda.mem_get_info()[0] > ROOMY
    width, steps = (
        (32, 12) if request.simulated else (4096, 60) if roomy and not request.quick else (1024, 30)
    )
    make = torch.Generator().manual_seed(5)
    model = torch.nn.Sequential(
        *(
            part
            for _ in range(4)
            for part in (
                torch.nn.Linear(width, 4 * width),
                torch.nn.ReLU(),
                torch.nn.Linear(4 * width, width),
            )
        )
    )
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=make) / param.shape[-1] ** 0.5)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(2 * width, width, generator=make).cuda()
    draw, losses, middle = random.Random(6), [], 0.0
    for step in range(steps):
        if step == steps // 2:
            torch.cuda.synchronize()
            middle = time.perf_counter()
        loss = model(data[: draw.randrange(width, 2 * width)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - middle) / (steps - steps // 2)
    stats = torch.cuda.memory_stats()
    found = {
        "losses": [float(loss) for loss in losses],
        "milliseconds a step": seconds * 1e3,
        "held over the live peak": stats["reserved_bytes.all.peak"] / stats["requested_bytes.all.peak"],
    }
    del model, optimizer, data, param, loss, losses
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return {**found, _LEFT: torch.cuda.memory_stats()["reserved_bytes.all.current"]}


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def bandwidth(request: PartRequest) -> PartOutcome:
    """Bytes a second of AdamW's update and of a norm, beside those of a copy of the same size."""
    import torch

    from memopt import amp, optim

    roomy = torch.cuda.mem_get_info()[0] > ROOMY
    count = 1 << (16 if request.simulated else 28 if roomy and not request.quick else 26)
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).cuda()
    param = torch.nn.Parameter(values)
    param.grad = values.clone()
    other = torch.empty_like(values)
    optimizer = optim.AdamW([param])
    rounds = 5 if request.quick else 20
    figures: Figures = {
        # Parameter, both states and gradient are read, the first three written; the norm reads the gradient.
        "copy, GB/s": _gigabytes(8 * count, lambda: other.copy_(values), rounds),
        "AdamW, fp32, GB/s": _gigabytes(28 * count, optimizer.step, rounds),
        "norm, fp32, GB/s": _gigabytes(4 * count, lambda: amp.clip_grad_norm_([param], math.inf), rounds),
    }
    copy = float(figures["copy, GB/s"])
    slow = [name for name, value in figures.items() if float(value) < SLOW * copy]
    if slow and not request.simulated:
        return PartOutcome("slow", f"less than {SLOW:.0%} of a copy's bandwidth: {', '.join(slow)}", figures)
    return PartOutcome("ok", figures=figures)


def _gigabytes(nbytes: int, run: Callable[[], object], rounds: int) -> float:
    """A second's, of the best round, by the device's events."""
    import torch

    run()
    best = math.inf
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3)
    return nbytes / max(best, 1e-9) / 1e9


# ---- estimate --------------------------------------------------------------------------------------------------------


def estimate(request: PartRequest) -> PartOutcome:
    """The peak that memopt.estimate() predicts, beside the one that torch counts when the same steps run here."""
    import torch

    import memopt

    width = 256 if request.simulated else 2048
    model = torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(width, 8, batch_first=True, dropout=0.0) for _ in range(4))
    )
    sample = torch.randn(4, 128, width)
    predicted = memopt.estimate(model, sample, optimizer=torch.optim.AdamW, quick=True, unprotected=True)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    on_device = sample.cuda()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model(on_device).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated()
    figures: Figures = {
        "predicted, bytes": predicted.allocated[1],
        "measured, bytes": measured,
        "predicted by": predicted.method,
    }
    low, high = predicted.allocated
    off = max(low / measured - 1, 1 - high / measured, 0.0)
    if off > ESTIMATE_ERROR:
        return PartOutcome("wrong", f"the predicted peak is off by {off:.1%} of the measured one", figures)
    return PartOutcome("ok", figures=figures)


# ---- the process -----------------------------------------------------------------------------------------------------


@contextmanager
def _device(simulated: bool) -> Iterator[None]:
    """The device that a part runs on; the simulated one computes what torch asks it to."""
    if not simulated:
        yield
        return
    from memopt import sim

    sim.activate(memory=SIMULATED_MEMORY)
    from memopt.sim._compute import Compute  # needs torch, which comes after activate()

    with Compute():
        yield


_PARTS: dict[str, Callable[[PartRequest], PartOutcome]] = {
    "environment": environment,
    "kernels": kernels,
    "aliasing": aliasing,
    "streams": streams,
    "driver": driver,
    "allocator": allocator,
    "bandwidth": bandwidth,
    "estimate": estimate,
}


def main() -> None:
    request = PartRequest(**next(process.requests()))
    with _device(request.simulated):
        if request.part == "loop":
            process.tell("finding", figures=loop(request))
        else:
            process.tell("finding", **_PARTS[request.part](request)._asdict())


if __name__ == "__main__":
    main()
