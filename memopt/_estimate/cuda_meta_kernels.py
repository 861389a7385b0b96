"""Operations on fake CPU tensors that keep what CUDA's kernels keep.

Without them the CPU's attention and dropout would be counted, which hold several times as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _Attention(torch.autograd.Function):
    """Flash attention's memory: the output and one number for each row are kept, gradients are summed in 32 bits."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, rows = ctx.saved_tensors
        sums = torch.empty_like(q, dtype=torch.float32), torch.empty_like(rows)
        made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del sums
        return made


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = query.new_empty(attn_mask.shape)  # a kernel gets it as numbers
    made: torch.Tensor = _Attention.apply(query, key, value)
    return made


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not p:
        return input  # type: ignore[no-any-return]
    made = torch.native_dropout(input, p, True)[0]
    return input.copy_(made) if inplace else made  # type: ignore[no-any-return]


_INSTEAD = {functional.scaled_dot_product_attention: _attention, functional.dropout: _dropout}


def _on_cpu(thing: Any) -> Any:
    if isinstance(thing, torch.device) and thing.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(thing, str) and thing.partition(":")[0] == "cuda" else thing


class LikeCuda(TorchFunctionMode):
    """A mode that gives code which asks for a CUDA device the CPU, whose tensors are fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return _INSTEAD.get(func, func)(*map(_on_cpu, args), **kwargs)
