"""The parameters on which gradient scalers and optimizers are timed, and the bounds that stand beside them.

    gpt     the tensors of a GPT-2 of 12 layers: 99 million parameters in 148, bytes are what counts
    many    5000 tensors of 10,000: bytes, and what each tensor costs
    tiny    1000 tensors of 4: what each tensor costs

Every contender has parameters and gradients of its own, equal at the start. A step leaves gradients as they were: the
loss scale is 1/2, so that unscaling doubles them, and the norm is clipped to what it was, which halves them again. All
the work is done, no factor is 1, and however often a step is repeated nothing vanishes or overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

SCALE = 0.5

Shapes = list[tuple[int, ...]]


def gpt(width: int, layers: int, vocabulary: int, length: int) -> Shapes:
    """As GPT-2's parameters are cut: attention and MLP of each layer, embeddings of tokens and of positions."""
    layer = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (length, width), *layer * layers, (width,), (width,)]


SETS: dict[str, Shapes] = {
    "gpt": gpt(768, 12, 16384, 1024),
    "many": [(10_000,)] * 5000,
    "tiny": [(4,)] * 1000,
}
QUICK_SETS: dict[str, Shapes] = {
    "gpt": gpt(96, 2, 256, 64),
    "many": [(10_000,)] * 20,
    "tiny": [(4,)] * 50,
}


def count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def describe(shapes: Shapes) -> str:
    """ "98.4M parameters in 148 tensors"."""
    elements = count(shapes)
    short = f"{elements / 1e6:.1f}M" if elements >= 1e6 else f"{elements:,}"
    return f"{short} parameters in {len(shapes)} tensors"


def clip_to(shapes: Shapes) -> float:
    """The norm of gradients of these shapes whose elements have the size of 1."""
    return math.sqrt(count(shapes))


def make(shapes: Shapes, device: str, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Parameters with gradients: the same for the same shapes, the gradients' norm being clip_to(shapes)."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        values, grad = (torch.randn(shape, generator=generator) for _ in range(2))
        parameter = Parameter(values.mul_(0.02).to(device, dtype))
        parameter.grad = grad.to(device, dtype)
        made.append(parameter)
    return made


def scaler(make: Callable[..., Any], device: str) -> Any:
    """A GradScaler that has its scale, as after scale(loss), and keeps it."""
    made = make(device, init_scale=SCALE, growth_interval=1 << 30)
    made.scale(torch.ones((), device=device))
    return made


def grads(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


class Bound:
    """Memory that is read, or read and written in place, as fast as torch can: sum() and mul_(1) of the tensors that
    are not small. `bytes` is what a call moves."""

    LARGE = 1 << 16  # bytes; a call costs microseconds by itself

    def __init__(self, read: Iterable[Tensor] = (), read_and_write: Iterable[Tensor] = ()) -> None:
        self.read, self.both = self._large(read), self._large(read_and_write)
        self.bytes = float(sum(t.nbytes for t in self.read) + 2 * sum(t.nbytes for t in self.both))
        if not self.bytes:
            raise ValueError(f"no tensor has {self.LARGE} bytes: nothing here is bound by memory")

    def _large(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [t.detach() for t in tensors if t.nbytes >= self.LARGE]

    def __call__(self) -> None:
        for t in self.read:
            t.sum()
        if self.both and self.both[0].device.type == "cuda":
            torch._foreach_mul_(self.both, 1.0)
            return
        for t in self.both:
            t.mul_(1.0)


def assert_equal_work(
    what: str, theirs: Iterable[Tensor], ours: Iterable[Tensor], tolerance: float = 5e-3
) -> None:
    """A check that both sides did the same: called before the timing, when both have made the same steps. The
    difference of all tensors as one vector, over its norm. The tolerance is torch's: its norm of a tensor of millions,
    summed up in fp32 on the CPU, is 5e-4 off."""
    difference = norm = 0.0
    for a, b in zip(theirs, ours, strict=True):
        difference += float((a.detach().double() - b.detach().double()).square().sum())
        norm += float(a.detach().double().square().sum())
    if not difference <= tolerance**2 * norm:
        raise AssertionError(f"{what}: results differ by {math.sqrt(difference / max(norm, 1e-300)):.3g}")
