"""The batch's dimension of a sample: which tensors have it, and samples of another size."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils import _pytree as pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what forward gets


def of_size(call: Call, size: int, count: int) -> Call:
    """The call with `count` samples in place of `size`, the same ones again and again."""

    def change(leaf: Any) -> Any:
        if not _has_batch(leaf, size):
            return leaf
        return leaf[torch.arange(count, device=leaf.device) % size]

    return pytree.tree_map(change, call)  # type: ignore[no-any-return]


def dynamic(module: torch.nn.Module, call: Call, size: int) -> dict[str, Any]:
    """dynamic_shapes of torch.export, where the batch may have any size."""
    batch = torch.export.Dim("batch")
    args, kwargs = pytree.tree_map(lambda leaf: {0: batch} if _has_batch(leaf, size) else None, call)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    shapes = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            shapes |= shapes.pop(name, {})
    return shapes


def _has_batch(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
