"""Costs of a model's training step: operations and bytes counted on shapes, seconds measured on this machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from memopt._compare.candidates import Candidate, same_random_states
from memopt._estimate.training import AMP, as_arguments, loss_of, to_device
from memopt._runtime.log import logger


@dataclass(frozen=True)
class Counts:
    """`forward`, `step`: FLOPs of the forward alone and of all of it, a multiplication and an addition being two.
    `operations`: of each operation its FLOPs, and the bytes of the tensors that it reads and writes."""

    forward: int
    step: int
    operations: list[tuple[int, int]]

    def seconds(self, flops_a_second: float, bytes_a_second: float) -> float:
        """Return a lower bound of the seconds: each operation takes as long as its arithmetic or its memory traffic
        (the roofline)."""
        return sum(max(f / flops_a_second, b / bytes_a_second) for f, b in self.operations)


def count(
    model: nn.Module, sample: Any, loss: Callable[[Any], Any] | None, train: bool, device: str = "meta"
) -> Counts:
    """Count one step of a model and a sample on that device. The model has gradients afterwards."""
    args, kwargs = as_arguments(to_device(sample, device))
    model.train(train)
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution}
    )
    with torch.set_grad_enabled(train), counter, _Reads(counter) as reads:
        out = model(*args, **kwargs)
        forward = counter.get_total_flops()
        if train:
            loss_of(out, loss).backward()
    return Counts(forward, counter.get_total_flops(), reads.operations)


def _convolution(grad_out: Any, x: Any, weight: Any, *more: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs of a convolution's backward: those of its forward for each gradient, of the input and of the
    weight. torch's own formula ignores groups, and so counts a depthwise convolution too often by the number of its
    groups."""
    transposed, mask = more[4], more[7]
    return int(conv_flop_count(x, weight, grad_out, transposed=transposed)) * (bool(mask[0]) + bool(mask[1]))


class _Reads(TorchDispatchMode):
    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.counter = counter
        self.operations: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counter.get_total_flops()
        out = func(*args, **(kwargs or {}))
        flops = self.counter.get_total_flops() - before
        if flops or not func.is_view:
            self.operations.append((flops, _bytes((args, kwargs, out))))
        return out


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


# ---- seconds ---------------------------------------------------------------------------------------------------------


SAMPLE_SECONDS = 0.3  # of steps in a round, and one at least
MOST_STEPS = 20


@dataclass(frozen=True)
class Step:
    """The parts and settings of a step besides the model."""

    device: torch.device
    optimizer: Any = None
    loss: Callable[[Any], Any] | None = None
    amp: str | None = None
    train: bool = True


@dataclass
class Times:
    """The times of one model: the median of each round. `error`: why there are no more."""

    rounds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds and self.error is None else None

    @property
    def spread(self) -> tuple[float, float] | None:
        return (min(self.rounds), max(self.rounds)) if self.rounds and self.error is None else None


def measure(models: list[Candidate], step: Step, rounds: int) -> dict[str, Times]:
    """Measure the models.

    Each is made anew in each round, in another order; an error of one does not affect the others."""
    found = {one.name: Times() for one in models}
    for number in range(rounds):
        first = number % len(models) if models else 0
        for one in models[first:] + models[:first]:
            times = found[one.name]
            if times.error is not None:
                continue
            logger.info("compare_models: %s, round %d of %d", one.name, number + 1, rounds)
            try:
                times.rounds.append(_round(one, step))
            except Exception as error:  # whatever a model of the user's raises
                times.error = f"{type(error).__name__}: {error}"
            gc.collect()
    return found


def _round(candidate: Candidate, step: Step) -> float:
    with same_random_states():
        model, sample = candidate.whole()
        model = model.to(step.device).train(step.train)
        args, kwargs = as_arguments(_own(sample, step.device))
        optimizer = step.optimizer(model.parameters()) if step.optimizer is not None and step.train else None
        seconds: list[float] = []
        while len(seconds) < 2 or (sum(seconds[1:]) < SAMPLE_SECONDS and len(seconds) < MOST_STEPS):
            begun = _now(step.device)
            autocast = nullcontext() if step.amp is None else torch.autocast(step.device.type, AMP[step.amp])
            with torch.set_grad_enabled(step.train), autocast:
                out = model(*args, **kwargs)
                total = loss_of(out, step.loss) if step.train else None
            del out
            if total is not None:
                total.backward()
                del total
                if optimizer is not None:
                    optimizer.step()
                model.zero_grad(set_to_none=True)
            seconds.append(_now(step.device) - begun)
    return statistics.median(seconds[1:])  # the first has what is done once


def _own(sample: Any, device: torch.device) -> Any:
    """Return copies: a model may write into its arguments, and its backward pass into gradients, and neither may be the
    caller's."""
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        sample,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- the machine -----------------------------------------------------------------------------------------------------


def rates(device: torch.device) -> tuple[float, float]:
    """Return FLOPs per second of a large matrix product, and bytes per second of a copy, read and written: the best of
    some runs."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
    source = torch.rand((64 << 20) // 4, device=device)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops = 2 * size**3 / _best(lambda: torch.mm(a, b), device)
        moved = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    return flops, moved


def _best(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(5):
        begun = _now(device)
        run()
        seconds.append(_now(device) - begun)
    return min(seconds)


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "the CPU"
    )
    return f"{name}, {torch.get_num_threads()} threads"
