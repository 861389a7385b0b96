"""Operations and bytes of a step, counted on shapes: torch's FLOP counter, and the bytes of operations' tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from memopt._estimate.training import as_arguments, loss_of


@dataclass(frozen=True)
class Counts:
    """`forward`, `step`: FLOPs of the forward alone and of all of it, a multiplication and an addition being two.
    `operations`: of each operation its FLOPs, and the bytes of the tensors that it reads and writes."""

    forward: int
    step: int
    operations: list[tuple[int, int]]

    def seconds(self, flops_a_second: float, bytes_a_second: float) -> float:
        """The least that it takes: each operation as long as its arithmetic or its memory does (the roofline)."""
        return sum(max(f / flops_a_second, b / bytes_a_second) for f, b in self.operations)


def count(
    model: nn.Module, sample: Any, loss: Callable[[Any], Any] | None, train: bool, device: str = "meta"
) -> Counts:
    """Of one step, of a model and a sample that are on that device. Gradients of the model's are there afterwards."""
    args, kwargs = as_arguments(
        pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, sample)
    )
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
    """Of a convolution's backward: as much as its forward for each gradient, of the input and of the weight. torch's
    own formula leaves the groups out of account, and gives a depthwise one as many times too much as it has groups."""
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
