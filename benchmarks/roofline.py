"""A lower bound of what a GPU takes for a program's operations, from their sizes alone.

    seconds of an operation = max(floating-point operations / peak, bytes / bandwidth)

Floating-point operations are torch's own formulas (torch.utils.flop_counter: products, convolutions, attention). Bytes
are those of the operation's tensors: what it is given is read once, what it returns written once. The peaks are an A100
40 GB's by NVIDIA's data sheet: 1555 GB/s, 312 TFLOP/s in fp16 and bf16, 19.5 TFLOP/s in fp32 (TF32 is not assumed).

Nothing is computed or waited for, so the simulated device does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BYTES_A_SECOND = 1555e9
FLOPS_A_SECOND = {torch.float16: 312e12, torch.bfloat16: 312e12}
FLOPS_OTHERWISE = 19.5e12
# Read as much as they return, not all that they are given.
PICKS = {"embedding", "index_select", "gather", "index"}
NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}


class Roofline(TorchDispatchMode):
    """While it is entered, the sums over all operations on the GPU, autograd's included."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.flops, self.bytes = 0.0, 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        flops, moved, peak = work_of(func, args, kwargs, out)
        self.flops, self.bytes = self.flops + flops, self.bytes + moved
        self.seconds += max(flops / peak, moved / BYTES_A_SECOND)
        return out


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any
) -> tuple[float, float, float]:
    """Return an operation's floating-point operations, its bytes, and the peak of the former a second."""
    name = func._schema.name.removeprefix("aten::")
    if name in NOTHING or is_view(func):
        return 0.0, 0.0, FLOPS_OTHERWISE
    given, made = tensors((args, kwargs)), tensors(out)
    moved = size(made) + (size(made) if name in PICKS else size(given))
    formula = flop_registry.get(func._overloadpacket)
    flops = float(formula(*args, **(kwargs or {}), out_val=out)) if formula else 0.0
    peak = max((FLOPS_A_SECOND.get(x.dtype, FLOPS_OTHERWISE) for x in given), default=FLOPS_OTHERWISE)
    return flops, moved, peak


def is_view(func: Any) -> bool:
    """Return whether it returns part of what it is given, and writes nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_cuda]


def size(them: Iterable[torch.Tensor]) -> float:
    """Bytes; an expanded tensor has no more than its storage."""
    return float(sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in them))
