"""Hooks that take an optimizer's gradients as backward() makes them: to the host, or into a step at once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class StandIn(Tensor):
    """Stands in .grad, without memory, for a gradient that is not on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, grad: Tensor, *_: object) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, grad.size(), strides=grad.stride(), dtype=grad.dtype, device=grad.device
        )

    def __init__(self, *_: object) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, device='{self.device}')"


class EndOfPass:
    """Calls a function at the end of each backward pass in which it was entered, also of one that fails: soon after
    that, as autograd's threads let go of it, and before the next pass.

    The work that the function is for goes to the stream on which the pass was entered.
    """

    def __init__(self, device: torch.device, function: Callable[[], None]) -> None:
        self._device, self._function, self._task = device, function, -1

    def enter(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            self._function()
            end = _Once(torch.cuda.current_stream(self._device), self._function)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]


class _Once:
    """A callback of autograd's, which drops it uncalled where a pass fails."""

    def __init__(self, stream: torch.cuda.Stream, function: Callable[[], None]) -> None:
        self._stream, self._function = stream, function
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._function()

    def __del__(self) -> None:
        if not self._called and not sys.is_finalizing():
            with torch.cuda.stream(self._stream):
                self._function()


class GradientHooks:
    """The hooks of one optimizer for one of its options."""

    option = ""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles: dict[int, Any] = {}  # by id(parameter)
        self._largest = 0  # bytes of a parameter
        weakref.finalize(optimizer, _remove, self._handles).atexit = False

    def take(self, parameters: Iterable[Tensor], shared: bool) -> None:
        """Take these parameters' gradients, too. shared: but for those that another optimizer has.

        Raises ValueError, before anything changes, for parameters that another optimizer has.
        """
        new = [p for p in parameters if id(p) not in self._handles and p.requires_grad]
        if new:
            self._refuse_ranks()
        others = [
            p
            for p in new
            if any(map(_takes, (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()))
        ]
        for p in others:
            if not shared:
                raise ValueError(
                    f"{self.option}=True: a parameter of shape {tuple(p.shape)} is another optimizer's already, "
                    "which has its gradient; give each parameter to one of them"
                )
        for p in new:
            if not any(p is other for other in others):
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(self._complete)  # type: ignore[attr-defined]
                self._largest = max(self._largest, p.nbytes)

    def remove(self) -> None:
        """Leave gradients where backward() makes them from now on."""
        self.settle()
        _remove(self._handles)

    def _complete(self, p: Tensor) -> None:
        """Take p.grad, which is whole."""
        raise NotImplementedError

    def settle(self) -> None:
        """Have the current stream go on behind all that a failed backward pass may have left."""
        raise NotImplementedError

    def _refuse_ranks(self) -> None:
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks and torch.distributed.get_world_size() > 1:
            raise RuntimeError(
                f"{self.option}=True: gradients would be taken before DDP or FSDP has added up those of all ranks; "
                "leave it out in a process of several ranks"
            )


def _takes(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), GradientHooks)


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
