"""Steps in the backward pass: each parameter's is taken as its gradient is complete, which is dropped then.

States on the host come and go beside the backward pass, on a stream of their own:

    the step       begins once the gradient is whole, and behind the step before
    its gradient   is kept until the backward pass has waited for it
    parameters     are the computation's again at the end of the backward pass
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt._runtime.signals import interrupted_later
from memopt.optim._gradient_hooks import EndOfPass, GradientHooks, StandIn
from memopt.optim._offloaded_gradients import LEAVING
from memopt.optim._state_layout import is_plain

if TYPE_CHECKING:
    from memopt.optim._one_pass import OnePass

aten = torch.ops.aten


class SteppedGradient(StandIn):
    """Stands for a gradient that a step has used up. All operations are refused."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return args[0]
        raise RuntimeError(
            f"{func} of a gradient with which step_in_backward=True has stepped already: it cannot be added to, "
            "unscaled, clipped or read any more. Call optimizer.step() or zero_grad(set_to_none=True) before the next "
            "backward(), and to accumulate, scale or clip gradients, leave step_in_backward out; "
            "offload_gradients=True saves as much of the device's memory"
        )


class _Side:
    """The stream of one device that steps run on, and the gradients that they read."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device
        self._reading: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._held = 0
        self.end = EndOfPass(device, self.finish)

    def note(self, grad: Tensor, most: int) -> None:
        """Keep the gradient for the step that was begun. most: bytes that may be kept, but for the last."""
        self._reading.append((grad, self.stream.record_event()))
        self._held += grad.nbytes
        while self._held > most and len(self._reading) > 1:
            self._settle()

    def finish(self) -> None:
        """Have the current stream go on behind all steps."""
        while self._reading:
            self._settle()

    def _settle(self) -> None:
        grad, done = self._reading.popleft()
        self._held -= grad.nbytes
        torch.cuda.current_stream(self._device).wait_event(done)


class BackwardSteps(GradientHooks):
    """The hooks that step an optimizer's parameters as their gradients are made."""

    option = "step_in_backward"

    def __init__(self, optimizer: OnePass) -> None:
        super().__init__(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._sides: dict[torch.device, _Side] = {}
        self._lock = threading.Lock()  # each device's backward pass has its thread

    def _complete(self, p: Tensor) -> None:
        grad, optimizer = p.grad, self._optimizer()
        group = {} if optimizer is None else optimizer.group_of(p)
        if optimizer is None or not group.get("step_in_backward"):
            return
        # What is left here is step()'s. With create_graph=True a gradient has a graph.
        if type(grad) is not Tensor or grad.requires_grad or grad.is_sparse or not is_plain(p):
            return
        self._refuse_ranks()
        with interrupted_later(fatal=False), self._lock:  # a gradient that was used must not stay
            if not (p.is_cuda and group.get("offload_states")):
                optimizer.step_alone(p, group)
            else:
                side = self._sides.get(p.device)
                if side is None:
                    side = self._sides[p.device] = _Side(p.device)
                side.end.enter()
                side.stream.wait_stream(torch.cuda.current_stream(p.device))
                try:
                    with torch.cuda.stream(side.stream):
                        optimizer.step_alone(p, group)
                finally:
                    side.note(grad, min(LEAVING, self._largest))
            torch.autograd.graph.increment_version(p)
            p.grad = SteppedGradient(grad)

    def settle(self) -> None:
        for side in self._sides.values():
            side.finish()


def steps_at_once(hook: Any) -> bool:
    """Return whether a parameter's hook steps it."""
    return isinstance(getattr(hook, "__self__", None), BackwardSteps)
