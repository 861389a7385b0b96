"""A vocabulary's head and its cross_entropy as torch's linear_cross_entropy, which never holds all logits at once.

The head's result is a tensor without memory, which cross_entropy takes. Any other use of it, except views of its rows,
computes the logits after all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

_CLASSES = 4  # times as many as the rows are wide, at least: a head, and no layer
_LARGE = 1 << 20  # elements of its result
_ROWS = (torch.Tensor.view, torch.Tensor.reshape)
_AS_IT_IS = (torch.Tensor.contiguous, torch.Tensor.float, torch.Tensor.to)
_FORM = (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point)


def install(met: Callable[[], object]) -> None:
    """Install it for the rest of the process; `met` is called for each loss found. Without effect before torch 2.13."""
    if not hasattr(functional, "linear_cross_entropy"):
        return
    linear = functional.linear

    @functools.wraps(linear)
    def head(rows: Any, weight: Any, bias: Any = None) -> Any:
        if (
            type(rows) is not torch.Tensor
            or not torch.is_grad_enabled()
            or weight.dim() != 2
            or rows.dim() < 2
        ):
            return linear(rows, weight, bias)
        classes, width = weight.shape
        if classes < _CLASSES * width or rows.numel() // width * classes < _LARGE:
            return linear(rows, weight, bias)
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            rows, weight = rows.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        return _Logits(rows, weight, bias, linear, met)

    functional.linear = head


class _Logits(torch.Tensor):
    @staticmethod
    def __new__(cls, rows: Any, weight: Any, *_: Any) -> _Logits:
        shape = (*rows.shape[:-1], weight.shape[0])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, rows: Any, weight: Any, bias: Any, linear: Any, met: Callable[[], object]) -> None:
        self.parts = rows, weight, bias, linear, met

    def of(self, rows: torch.Tensor) -> _Logits:
        return _Logits(rows, *self.parts[1:])

    @functools.cached_property
    def made(self) -> torch.Tensor:
        rows, weight, bias, linear, _ = self.parts
        return linear(rows, weight, bias)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args else None
        if getattr(func, "__name__", "") == "__get__" or func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(this, _Logits):
            found = _followed(this, func, args[1:], kwargs)
            if found is not None:
                return found
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(_Logits, lambda one: one.made, (args, kwargs or {}))
        return func(*args, **kwargs)


def _followed(logits: _Logits, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call on logits that are not computed; None if they have to be."""
    rows, weight, bias, _, met = logits.parts
    if func is functional.cross_entropy and logits.dim() == 2:
        target, *more = args or (kwargs["target"],)
        options = dict(
            zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), more, strict=False)
        )
        options |= {name: value for name, value in kwargs.items() if name not in ("input", "target")}
        old = [options.pop(name, None) for name in ("size_average", "reduce")]
        if target.dtype != torch.long or old != [None, None]:
            return None
        met()
        chunks = torch.nn.LinearCrossEntropyOptions()
        return functional.linear_cross_entropy(
            rows, weight, target, linear_bias=bias, options=chunks, **options
        )
    if func in _AS_IT_IS and not (func is torch.Tensor.to and not _only_to_dtype(args, kwargs)):
        return logits
    if func in _ROWS:
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if shape and (shape[-1] == logits.shape[-1] or (shape[-1] == -1 and len(shape) == logits.dim())):
            return logits.of(rows.reshape(*shape[:-1], rows.shape[-1]))
    if func is torch.Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        cut = all(one is Ellipsis or isinstance(one, slice) for one in index)
        if cut and ((len(index) < logits.dim() and Ellipsis not in index) or index[-1] == slice(None)):
            return logits.of(rows[args[0]])
    return None


def _only_to_dtype(args: Any, kwargs: Any) -> bool:
    return not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype)
