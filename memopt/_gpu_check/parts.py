"""The parts of `memopt gpu-check`: a function each, of which a process that processes.py has started runs one.

The larger ones have a module each."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memopt._estimate import cards
from memopt._gpu_check.aliasing_part import aliasing
from memopt._gpu_check.allocator_part import allocator, loop
from memopt._gpu_check.driver_part import driver
from memopt._gpu_check.environment_part import environment
from memopt._gpu_check.estimate_part import estimate, steps
from memopt._gpu_check.feature_part import features, rank
from memopt._gpu_check.kernel_part import kernels, load, only_loads
from memopt._gpu_check.part_outcome import (
    ROOMY,
    Figures,
    PartOutcome,
    PartRequest,
    late_work,
    use_memopts_allocator,
)
from memopt._runtime import process

if TYPE_CHECKING:
    import torch

SIMULATED_MEMORY = "2GiB"
# A kernel that reaches less of a copy's bandwidth is slow: the kernels are built to be bound by memory.
SLOW = 0.7


# ---- streams ---------------------------------------------------------------------------------------------------------


def streams(request: PartRequest) -> PartOutcome:
    """Memory that goes from stream to stream is not written while another stream still reads it."""
    import torch

    use_memopts_allocator()
    rounds, size = (200, 1 << 12) if request.simulated else (2000, 1 << 22)
    draw, seed = random.Random(9), 9
    several = [torch.cuda.Stream() for _ in range(3)]
    live: list[torch.Tensor] = []
    with late_work(request.simulated):
        numbers = torch.arange(16).repeat_interleave(size).view(16, size).cuda()  # a row a round, in turn
        read = torch.full((rounds, 2), -1).cuda()
        scratch = torch.empty(size, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for number in range(rounds):
            writer, reader = draw.sample(several, 2)
            count = draw.randrange(size // 2, size)
            with torch.cuda.stream(writer):
                written = torch.empty(count, dtype=torch.int64, device="cuda")
                written.copy_(numbers[number % 16, :count])
            reader.wait_stream(writer)
            with torch.cuda.stream(reader):
                for _ in range(draw.randrange(4)):  # so that what is read is read late
                    scratch[:count].copy_(written)
                read[number, 0].copy_(written[0])
                read[number, 1].copy_(written[-1])
            written.record_stream(reader)
            live.append(written)
            del written
            while len(live) > draw.randrange(8):
                live.pop(draw.randrange(len(live)))
            if request.simulated:
                _run_ahead(draw, several)
        torch.cuda.synchronize()
        bad = int((read.cpu() != torch.arange(rounds)[:, None] % 16).any(1).sum())
    live.clear()
    torch.cuda.empty_cache()
    figures: Figures = {"blocks that were read by another stream": rounds, "seed": seed}
    if bad:
        return PartOutcome(
            "wrong", f"{bad} of {rounds} blocks were written while another stream still read them", figures
        )
    return PartOutcome("ok", figures=figures)


def _run_ahead(draw: random.Random, several: list[torch.cuda.Stream]) -> None:
    """Run some of one stream's queued work before the others', as a GPU might."""
    from memopt import sim

    sim.progress(draw.randrange(6), draw.choice(several).cuda_stream)


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def bandwidth(request: PartRequest) -> PartOutcome:
    """Bytes a second of AdamW's update and of a norm, beside those of a copy of the same size."""
    import torch

    from memopt import amp, optim

    roomy = torch.cuda.mem_get_info()[0] > ROOMY
    count = 1 << (14 if request.simulated else 28 if roomy and not request.quick else 26)
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


# ---- the process -----------------------------------------------------------------------------------------------------


@contextmanager
def _device(request: PartRequest) -> Iterator[None]:
    """The device that a part runs on; the simulated one computes what torch asks it to."""
    if not request.simulated and request.part != "steps":
        yield
        return
    from memopt import sim
    from memopt.sim import _activation

    os.environ["OMP_NUM_THREADS"] = "1"  # the work is small: more threads would only wait for each other
    # Two devices reach each other; dependent launches need compute capability 9.0.
    if request.part == "aliasing":
        sim.activate(SIMULATED_MEMORY, devices=2, compute_capability="9.0")
    elif request.part == "steps":  # which the estimate's part compares with its own device
        _activation.activate_from(request.contender)
    else:
        sim.activate(SIMULATED_MEMORY, context=cards.CONTEXT if request.part == "estimate" else 0)
    # No torch is needed, or no values: Compute changes what attention asks for.
    if only_loads(request) or request.part in ("estimate", "steps"):
        yield
        return
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
    "features": features,
}
# What parts run in processes that they start themselves.
_WITHIN: dict[str, Callable[[PartRequest], dict[str, Any]]] = {
    "loop": loop,
    "load": load,
    "rank": rank,
    "steps": steps,
}


def main() -> None:
    request = PartRequest(**next(process.requests()))
    with _device(request):
        if request.part in _WITHIN:
            process.tell("finding", figures=_WITHIN[request.part](request))
        else:
            process.tell("finding", **_PARTS[request.part](request)._asdict())


if __name__ == "__main__":
    main()
