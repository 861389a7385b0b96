"""The peak of a planned model's own step, by the allocator's figures, for its plan's check()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memopt._checkpoint.stages.costs import (
    AllocatorBytes,
    CpuBytes,
    allocator_bytes,
    bytes_of,
    gradients_on,
    tensors_in,
)
from memopt._checkpoint.stages.model_chain import is_deferred
from memopt.optim._gradient_hooks import StandIn


def gradient_bytes(parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the gradients that are there; what stands for one has none."""
    return bytes_of(grad for grad in gradients_on(parameters, device) if not isinstance(grad, StandIn))


class StepPeak:
    """A watch of one step, from before its forward pass to the end of its backward pass.

    The graph alone holds it, and it ends with the graph. No figures of others are reset: on a CUDA device, where others
    raise and reset the peak, a step shows if it raises it. On a CPU only what is made meanwhile is seen, so gradients
    of before are counted apart: those there when the forward pass begins, then those there when the backward pass does.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        standing: int,
        take: Callable[[int], None],
    ) -> None:
        """Begin. standing: bytes that are there already, gradients apart. take: called with the peak, if it shows."""
        self.allocator: AllocatorBytes | None = allocator_bytes(device, blocks=True, yielding=True)
        self.parameters, self.take = parameters, take
        self.device = device
        self.standing, self.gradients, self.most = standing, gradient_bytes(parameters, device), 0
        self.in_backward = False
        self.allocator.start()
        if isinstance(self.allocator, CpuBytes) and not self.allocator.own:
            self.allocator = None  # a watch of another's has the figures, whose peak is not to be reset
            return
        self.before, self.highest = self.allocator.now_and_peak()

    def until_backward_of(self, out: Any) -> None:
        """Let it end when the backward pass of these tensors has."""
        if self.allocator is None:
            return
        for tensor in tensors_in(out):
            end = tensor.hidden if is_deferred(tensor) else tensor  # type: ignore[attr-defined]
            if end.grad_fn is not None:
                end.grad_fn.register_prehook(self._begin_backward)

    def _begin_backward(self, grads: Any) -> None:
        if self.in_backward:
            return
        self.in_backward = True
        if isinstance(self.allocator, CpuBytes):
            self._note(self.allocator.restart()[1])
            self.gradients = gradient_bytes(self.parameters, self.device)
        torch.autograd.Variable._execution_engine.queue_callback(self.end)  # type: ignore[attr-defined]

    def _note(self, peak: int) -> None:
        if peak > self.highest:
            self.most = max(self.most, self.standing + self.gradients + peak - self.before)

    def end(self) -> None:
        """Tell the step's peak; the second time nothing happens."""
        if (allocator := self.allocator) is None:
            return
        self.allocator = None
        self._note(allocator.now_and_peak()[1])
        if allocator.stop() and self.most:
            self.take(self.most)

    def __del__(self) -> None:
        if self.allocator is not None:
            self.allocator.stop()
