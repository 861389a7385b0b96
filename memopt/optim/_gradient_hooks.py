"""Hooks that take an optimizer's gradients as backward() makes them: to the host, or into a step at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GradientHooks:
    """The hooks of one optimizer for one of its options."""

    option = ""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles: dict[int, Any] = {}  # by id(parameter)
        self._task = -1  # the backward pass at whose end _finish() is called
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

    def _complete(self, p: Tensor) -> None:
        """Take p.grad, which is whole."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Have _finish() called at the end of this backward pass."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._refuse_ranks()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        """End a backward pass; it is not called for one that failed."""

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
