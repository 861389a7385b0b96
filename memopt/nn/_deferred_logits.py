"""Logits that are computed where they are used, and not at all where only their cross entropy is.

A model multiplies its head's inputs by the weight, casts, caps, scales and reshapes the product, and calls
torch.nn.functional.cross_entropy. DeferredLogits stands for the product and records the rest, until that call gives
its place to linear_cross_entropy. Anything else that is done with it computes the logits first, as the plain head does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from memopt._runtime.log import logger
from memopt.nn._linear_cross_entropy import linear_cross_entropy

Step = tuple[str, Any]
"""An operation on each logit: ("to", dtype), ("mul", number), ("div", number) or ("tanh", None)."""


class LossHead(nn.Linear):
    """The class of a head whose logits may be deferred.

    The loss is a call of the module as well, so that what its hooks, offload_layers() and FSDP do for a call (bring the
    weight) is done for it.

    Attributes:
        defers: Whether a call returns deferred logits.
        chunk_bytes: Of linear_cross_entropy.
    """

    defers: bool
    chunk_bytes: int

    def forward(self, input: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
        if loss is not None:
            return loss(input, self.weight, self.bias)
        if self.defers and not isinstance(input, DeferredLogits):
            kind = input.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            return DeferredLogits(self, input, autocast, (), autocast or self.weight.dtype)
        return super().forward(input)


class DeferredLogits(Tensor):
    """The logits of a LossHead, with shape, dtype and device but no memory until they are used."""

    is_deferred = True  # for who does not import this module
    head: LossHead
    hidden: Tensor
    autocast: torch.dtype | None
    steps: tuple[Step, ...]
    value: Tensor | None

    @staticmethod
    def __new__(
        cls,
        head: LossHead,
        hidden: Tensor,
        autocast: torch.dtype | None,
        steps: tuple[Step, ...],
        dtype: torch.dtype,
    ) -> DeferredLogits:
        shape = (*hidden.shape[:-1], head.out_features)
        made: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)  # type: ignore[attr-defined]
        made.head, made.hidden, made.autocast, made.steps, made.value = head, hidden, autocast, steps, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def computed(self) -> Tensor:
        """Return the logits, which are computed the first time."""
        if self.value is None:
            defers, self.head.defers = self.head.defers, False
            enabled = self.autocast is not None
            try:
                with torch.autocast(self.hidden.device.type, self.autocast, enabled):
                    value = self.head(self.hidden)
                    for name, operand in self.steps:
                        value = getattr(value, name)(*([] if operand is None else [operand]))
            finally:
                self.head.defers = defers
            self.value = value
        return self.value

    def like(self, hidden: Tensor | None = None, *steps: Step, dtype: torch.dtype | None = None) -> Tensor:
        """Return these logits with other rows, or after further steps."""
        rows = self.hidden if hidden is None else hidden
        with torch._C.DisableTorchFunctionSubclass():
            return DeferredLogits(self.head, rows, self.autocast, self.steps + steps, dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(first, DeferredLogits) and first.value is None:
            with torch._C.DisableTorchFunctionSubclass():
                answered = answer(*args, **kwargs)
            if answered is not NotImplemented:
                return answered
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, DeferredLogits) and first.head.defers and first.value is None:
            logger.info("fuse_loss_head: the logits are computed, for %s", getattr(func, "__name__", func))
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func}: logits that fuse_loss_head() has deferred reached C++ code before they were computed: pass "
            "outputs.logits.clone(), or .remove() the handle that fuse_loss_head() returned"
        )


# ---- what is recorded ------------------------------------------------------------------------------------------------


def _requires_grad(logits: DeferredLogits) -> bool:
    parameters = [p for p in (logits.head.weight, logits.head.bias) if p is not None]
    return torch.is_grad_enabled() and any(t.requires_grad for t in (logits.hidden, *parameters))


def _same(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else logits


def _float(logits: DeferredLogits, *args: Any) -> Any:
    return _cast(logits, torch.float32)


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Tensor:
    return logits if dtype == logits.dtype else logits.like(None, ("to", dtype), dtype=dtype)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) != 1:
        return NotImplemented
    (what,) = (*args, *kwargs.values())
    if isinstance(what, torch.dtype):
        return _cast(logits, what) if what.is_floating_point else NotImplemented
    if isinstance(what, (str, torch.device, int)) and set(kwargs) <= {"device"}:
        there = torch.device("cuda", what) if isinstance(what, int) else torch.device(what)
        return logits if there in (logits.device, torch.device(logits.device.type)) else NotImplemented
    return NotImplemented


def _by_number(name: str, logits: DeferredLogits, number: Any, **kwargs: Any) -> Any:
    if kwargs or type(number) not in (int, float):
        return NotImplemented
    return logits.like(None, (name, number))


def _tanh(logits: DeferredLogits) -> Any:
    return logits.like(None, ("tanh", None))


def _reshape(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if kwargs or not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return logits.like(logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim not in (-2, logits.dim() - 2):
        return NotImplemented
    return logits.like(logits.hidden.flatten(start_dim, end_dim))


def _getitem(logits: DeferredLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return NotImplemented
    takes_last = parts[-1] is not Ellipsis and (len(parts) == logits.dim() or Ellipsis in parts)
    if takes_last and parts[-1] != slice(None):
        return NotImplemented
    return logits.like(logits.hidden[index])


def _scale_and_cap(steps: tuple[Step, ...]) -> tuple[float, float | None] | None:
    """Return the factor of the logits, and the cap c of c * tanh(factor / c * x); None for steps of another form."""
    factors, tangents = [1.0, 1.0], 0
    for name, operand in steps:
        if name == "tanh":
            tangents += 1
        elif name != "to" and tangents < 2:
            factors[tangents] *= operand if name == "mul" else 1 / operand
    if tangents == 0:
        return factors[0], None
    if tangents > 1 or not 0 < factors[1] < float("inf"):
        return None
    return factors[0] * factors[1], factors[1]


def _cross_entropy(
    logits: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and logits.dim() == 2
    form = _scale_and_cap(logits.steps)
    if not plain or form is None or target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        return NotImplemented
    scale, cap = form
    if abs(scale - 1) < 1e-12:
        scale = 1.0
    loss = partial(
        _loss,
        target=target,
        scale=scale,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=cap,
        chunk_bytes=logits.head.chunk_bytes,
    )
    found = logits.head(logits.hidden, loss=loss)
    autocast = torch.is_autocast_enabled(logits.device.type)
    return found if autocast else found.to(logits.dtype)


def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, target: Tensor, scale: float, **options: Any
) -> Tensor:
    if scale != 1:
        hidden, bias = hidden * scale, None if bias is None else bias * scale
    return linear_cross_entropy(hidden, weight, target, bias, **options)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _same,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _getitem,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    functional.cross_entropy: _cross_entropy,
}
_ANSWERS |= dict.fromkeys(
    (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), partial(_by_number, "mul")
)
_ANSWERS |= dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), partial(_by_number, "div"))

_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__hash__),
    *(Tensor.__len__, torch.is_floating_point, torch.numel),
}
