"""Techniques applied to a script from outside, so that an estimate can test its advice."""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from memopt._estimate.request import (
    CHECKPOINT,
    EIGHT_BITS,
    FUSED,
    LOSS_HEAD,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_LAYERS,
)

_HAVE_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class Techniques:
    """Techniques installed for the rest of the process, before the script begins.

    Args:
        wanted: Names of techniques, as a request has them.

    Attributes:
        applied: Parts of the script that each technique was applied to, such as {"fused": ["AdamW"]}; a technique that
            was applied to nothing has no entry.
    """

    def __init__(self, wanted: list[str]) -> None:
        self.applied: dict[str, list[str]] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth = 0
        names = {name.partition(":")[0] for name in wanted}
        if EIGHT_BITS in names:
            self._eight_bits()
        if FUSED in names:
            self._fused()
        if names & {OFFLOAD_LAYERS, CHECKPOINT}:
            self._watch_optimizers(offloads=OFFLOAD_LAYERS in names)
        if LOSS_HEAD in names:
            _install_loss_head(lambda: self.applied.setdefault(LOSS_HEAD, ["cross_entropy"]))
        budget = next((int(name.partition(":")[2]) for name in wanted if name.startswith(CHECKPOINT)), None)
        if budget is not None or OFFLOAD_ACTIVATIONS in names:
            self._around_calls(budget, OFFLOAD_ACTIVATIONS in names)

    def _met(self, technique: str, what: object) -> None:
        met, name = self.applied.setdefault(technique, []), type(what).__name__
        if name not in met:
            met.append(name)

    # ---- optimizers -----------------------------------------------------------------------------------------------

    def _eight_bits(self) -> None:
        import memopt.optim

        for name in ("Adam", "AdamW"):
            kind = self._of_eight_bits(getattr(memopt.optim, name))
            setattr(torch.optim, name, kind)
            setattr(importlib.import_module(f"torch.optim.{name.lower()}"), name, kind)

    def _of_eight_bits(self, ours: Any) -> type:
        met = self._met

        class EightBits(ours):  # type: ignore[misc]
            def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("amsgrad"):
                    super().__init__(params, *args, **kwargs)
                    return
                super().__init__(params, *args, state_bits=8, **kwargs)
                met(EIGHT_BITS, self)

        EightBits.__name__ = EightBits.__qualname__ = ours.__name__
        return EightBits

    def _fused(self) -> None:
        for name in _HAVE_FUSED:
            kind = getattr(torch.optim, name)
            kind.__init__ = self._given_fused(kind.__init__)

    def _given_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            chosen = (kwargs.get(name) for name in ("fused", "foreach", "differentiable"))
            if any(one is not None and one is not False for one in chosen):
                original(optimizer, params, *args, **kwargs)
                return
            original(optimizer, params, *args, **kwargs | {"fused": True})
            self._met(FUSED, optimizer)

        return init

    def _watch_optimizers(self, offloads: bool) -> None:
        """Note each optimizer that is made; before it, offload the layers whose parameters it is given."""
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
            if offloads:
                params = list(params)
                self._offload_layers(params)
            original(optimizer, params, *args, **kwargs)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]

    # ---- models ---------------------------------------------------------------------------------------------------

    def _offload_layers(self, groups: list[Any]) -> None:
        """Offload layers before the optimizer is made, because its states are to be where the parameters are then."""
        import memopt

        given = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
        stepped = {id(p) for p in given if isinstance(p, torch.Tensor)}
        for model in _models():
            if model not in self._offloaded and any(id(p) in stepped for p in model.parameters()):
                memopt.offload_layers(model)
                self._offloaded.add(model)
                self._met(OFFLOAD_LAYERS, model)

    def _around_calls(self, budget: int | None, offload: bool) -> None:
        """Wrap each outermost call of a module with gradients, which is a model's forward pass.

        A part of such a model that is called by itself runs again in a backward pass.
        """
        import memopt

        original = nn.Module.__call__
        models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._depth and torch.is_grad_enabled() and module not in parts
            if not outermost or not _is_trained(module):
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                if module not in models:
                    models.add(module)
                    parts.update(part for part in module.modules() if part is not module)
                    if budget is not None:
                        self._checkpoint(module, args, kwargs, budget)
                if not offload:
                    return original(module, *args, **kwargs)
                self._met(OFFLOAD_ACTIVATIONS, module)
                with memopt.offload_activations():
                    return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]

    def _checkpoint(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget: int
    ) -> None:
        import memopt

        if args and kwargs:
            raise ValueError(
                "auto_checkpoint takes positional arguments or keyword arguments as its sample, not both"
            )
        mine = {id(p) for p in model.parameters()}
        stepped = (
            one
            for one in self._optimizers
            if any(id(p) in mine for g in one.param_groups for p in g["params"])
        )
        memopt.auto_checkpoint(
            model, kwargs or args, memory_budget=budget, optimizer=next(stepped, None), accumulate=True
        )
        self._met(CHECKPOINT, model)


def _models() -> list[nn.Module]:
    """Return modules that are in no other module."""
    modules = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
    below = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in below]


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


# ---- the loss head ---------------------------------------------------------------------------------------------------


_CLASSES = 4  # times as many as the rows are wide, at least: a head, and no layer
_LARGE = 1 << 20  # elements of its result
_ROWS = (torch.Tensor.view, torch.Tensor.reshape)
_AS_IT_IS = (torch.Tensor.contiguous, torch.Tensor.float, torch.Tensor.to)
_FORM = (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point)


def _install_loss_head(met: Callable[[], object]) -> None:
    """Run a vocabulary's head and its cross_entropy as one from now on; `met` is called for each loss found.

    Without effect before torch 2.13.
    """
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
    """A head's result without memory. cross_entropy takes it by torch's linear_cross_entropy, which never holds all
    logits at once; any other use of it, except views of its rows, computes the logits after all."""

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
