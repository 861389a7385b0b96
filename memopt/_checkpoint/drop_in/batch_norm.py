"""Running statistics of normalization that count a batch once, although the function runs twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_of_thread = threading.local()


class _OfProcess:
    depth = 0  # of all threads: nearly always 0, and then no thread need be asked


of_process = _OfProcess()
_lock = threading.Lock()


def is_once() -> bool:
    """Return whether this thread runs a region that asked for one update of running statistics, for the first or the
    second time."""
    return getattr(_of_thread, "depth", 0) > 0


@contextmanager
def inside() -> Iterator[None]:
    _of_thread.depth = getattr(_of_thread, "depth", 0) + 1
    with _lock:
        of_process.depth += 1
    try:
        yield
    finally:
        _of_thread.depth -= 1
        with _lock:
            of_process.depth -= 1


def first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for its first run: regions inside know."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return function(*args, **kwargs)

    return run


class Copies:
    """Copies of modules' running statistics, for a second run to change in their place.

    The statistics are therefore neither changed nor rounded, not even by an infinity, and as many tensors are saved as
    before. buffers: the statistics by the address of their copy's storage: a graph that saves a copy (and uses none of
    it in training mode) can have the buffer.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.own: dict[_NormBase, dict[str, torch.Tensor]] = {}

    def put(self, module: _NormBase) -> None:
        if module in self.own or not (module.training and module.track_running_stats):
            return
        buffers = {name: module._buffers.get(name) for name in _STATISTICS}
        self.own[module] = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        with torch.no_grad():
            for name, buffer in self.own[module].items():
                copy = module._buffers[name] = buffer.clone()
                self.buffers[copy.untyped_storage()._cdata] = buffer

    def take_off(self) -> None:
        for module, buffers in self.own.items():
            module._buffers.update(buffers)


def modules_in(module: torch.nn.Module) -> tuple[_NormBase, ...]:
    """Return the modules whose running statistics a forward pass in training mode changes."""
    return tuple(m for m in module.modules() if isinstance(m, _NormBase))


def of_function(function: Callable[..., Any]) -> tuple[_NormBase, ...] | None:
    """Return such modules in the module that the function is, or is a method of; None for any other function.

    A part of a module's forward names those that it calls, `modules_called`.
    """
    if (called := getattr(function, "modules_called", None)) is not None:
        return tuple(m for m in called if isinstance(m, _NormBase))
    module = getattr(function, "__self__", function)
    return modules_in(module) if isinstance(module, torch.nn.Module) else None


@contextmanager
def kept(modules: Iterable[_NormBase] | None = None) -> Iterator[Copies]:
    """A second run of what these modules are in, or of what calls no one knows which; regions inside know."""
    copies = Copies()
    thread = threading.get_ident()

    def put(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, _NormBase) and threading.get_ident() == thread:
            copies.put(module)

    try:
        with ExitStack() as stack:
            stack.enter_context(inside())
            if modules is None:
                stack.callback(register_module_forward_pre_hook(put).remove)
            for module in modules or ():
                copies.put(module)
            yield copies
    finally:
        copies.take_off()


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for its second run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with kept():
            return function(*args, **kwargs)

    return run
