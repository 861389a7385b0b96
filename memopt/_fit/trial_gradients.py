"""Gradients of trial steps, which go as an optimizer's hooks would have them go, without a step.

step_in_backward      the step's memory is taken and freed, then the gradient goes
with offload_states   besides, the room that states come to; the gradient stays until a later one is complete
offload_gradients     the gradient stays so, too, with what it was added to; its norm stays
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.optim._offloaded_gradients import LEAVING


class TrialGradients:
    """Hooks on parameters, within a context.

    rooms: of each parameter (by its id) bytes of the memory that its step takes. stays: whether gradients are kept for
    copies or steps that have begun. sums: whether each is added to one of before. has_norms: whether norms stay.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rooms: Mapping[int, Sequence[int]],
        *,
        stays: bool = False,
        sums: bool = False,
        has_norms: bool = False,
    ) -> None:
        self.parameters, self.rooms = parameters, rooms
        self.stays, self.sums, self.has_norms = stays, sums, has_norms
        self.most = min(LEAVING, max((p.nbytes for p in parameters), default=0)) if stays else 0
        self._kept: list[list[Tensor]] = []
        self._norms: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for p in self.parameters:
            self._hooks.append(p.register_post_accumulate_grad_hook(self._complete))  # type: ignore[attr-defined]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._norms.clear()
        self._kept.clear()

    def _complete(self, p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        rooms = [_bytes(size, p) for size in self.rooms.get(id(p), ())]
        del rooms
        p.grad = None
        if self.has_norms:
            self._norms[id(p)] = torch.empty((), dtype=torch.float64, device=p.device)
        if not self.stays:
            return
        if not self._kept:
            torch.autograd.Variable._execution_engine.queue_callback(self._kept.clear)  # type: ignore[attr-defined]
        self._kept.append([grad, torch.empty_like(grad)] if self.sums else [grad])
        while len(self._kept) > 1 and sum(t.nbytes for kept in self._kept for t in kept) > self.most:
            del self._kept[0]


def _bytes(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.device)
