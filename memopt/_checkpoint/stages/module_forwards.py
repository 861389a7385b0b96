"""A module's own forward, and another in its place: a plan's, for as long as it stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class ClassForward:
    """A module's forward by its class. Unlike the bound method, it is that in a saved module with another one too."""

    __slots__ = ("__self__",)

    def __init__(self, module: torch.nn.Module) -> None:
        self.__self__ = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.__self__).forward.__get__(self.__self__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.__self__).forward(self.__self__, *args, **kwargs)


def own_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module's forward, for as long as it may have another in its place."""
    forward: Callable[..., Any] = module.forward
    is_classes = getattr(forward, "__func__", None) is getattr(type(module), "forward", forward)
    return ClassForward(module) if is_classes and getattr(forward, "__self__", None) is module else forward


def restore_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Give the module the forward that own_forward() returned."""
    if isinstance(forward, ClassForward):
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def is_its_classes(module: torch.nn.Module) -> bool:
    """Return whether the module's forward is its class's own, neither compiled nor replaced.

    A replaced forward may have effects that cannot be seen.
    """
    return not (
        "forward" in module.__dict__ or hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    )


@contextmanager
def forwards(modules: Sequence[torch.nn.Module], replacements: Sequence[Any]) -> Iterator[None]:
    """Replace the forwards of these modules within the context."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, replacement in zip(modules, replacements, strict=True):
            module.__dict__["forward"] = replacement
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if old is not None:
                module.__dict__["forward"] = old
