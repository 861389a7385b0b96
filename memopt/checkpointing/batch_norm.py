"""Running statistics of normalisation that count a batch once, though the function it is in runs twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Whether this thread is inside a region, or its second run, that asked for it."""
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


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for its second run: each module that would update its statistics is given copies of them
    meanwhile. So what they are is neither changed nor rounded, not even by an infinity, and tensors saved are as many
    as before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        swapped: dict[_NormBase, dict[str, torch.Tensor]] = {}

        def swap(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() != thread or not isinstance(module, _NormBase) or module in swapped:
                return
            if not (module.training and module.track_running_stats):
                return
            buffers = {name: module._buffers.get(name) for name in _STATISTICS}
            swapped[module] = {name: buffer for name, buffer in buffers.items() if buffer is not None}
            with torch.no_grad():
                for name, buffer in swapped[module].items():
                    module._buffers[name] = buffer.clone()

        hook = register_module_forward_pre_hook(swap)
        try:
            with inside():
                return function(*args, **kwargs)
        finally:
            hook.remove()
            for module, buffers in swapped.items():
                module._buffers.update(buffers)

    return run
