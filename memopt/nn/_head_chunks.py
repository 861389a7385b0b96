"""A linear layer's cross entropy and its gradients, chunk by chunk of the logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memopt import _C
from memopt._runtime import kernels

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden, weight and bias; None where none is needed."""

_NONE: tuple[bool, bool, bool] = (False, False, False)


class Head:
    """One call's targets and options.

    Two orders of the same work: rows with all classes, which the loss and the gradient of hidden sum over, and, for
    gradients of 16 bits, blocks of classes with all rows, over which the gradients of weight and bias are sums. In
    float32 and float64 the latter are added up over the chunks of rows, which costs no second set of logits.

    The tensors may be of another type than `dtype`: they are cast here, so that autograd keeps no cast copy.
    """

    def __init__(
        self,
        target: Tensor,
        rows: Tensor | None,
        classes: int,
        dtype: torch.dtype,
        smoothing: float,
        softcap: float,
        chunk_bytes: int,
    ) -> None:
        self.target, self._rows, self._classes, self.dtype = target, rows, classes, dtype
        self._smoothing, self._softcap, self._chunk_bytes = smoothing, softcap, chunk_bytes

    def gathered(self, rows: Tensor) -> Tensor:
        return rows if self._rows is None else rows[self._rows]

    def scattered(self, kept: Tensor, count: int) -> Tensor:
        """Put kept rows at their places among `count`, and zeros at the others."""
        if self._rows is None:
            return kept
        return kept.new_zeros(count, *kept.shape[1:]).index_copy_(0, self._rows, kept)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        needed: tuple[bool, bool, bool] | None,
    ) -> tuple[Tensor, Tensor, Gradients | None]:
        """Return a loss and an lse for each kept row and, with `needed`, the gradients of `scale` times their sum."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        losses, lse = (hidden.new_empty(self.target.shape, dtype=dtype) for _ in range(2))
        scales = None if needed is None else torch.full_like(losses, scale)
        gradients = self._run(hidden, weight, bias, losses, lse, scales, needed or _NONE)
        return losses, lse, None if needed is None else gradients

    def gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scales: Tensor,
        lse: Tensor,
        needed: tuple[bool, bool, bool],
    ) -> Gradients:
        """Return the gradients where each kept row's loss has a factor, from logits that are computed again."""
        return self._run(hidden, weight, bias, None, lse, scales, needed)

    def _run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        losses: Tensor | None,
        lse: Tensor,
        scales: Tensor | None,
        needed: tuple[bool, bool, bool],
    ) -> Gradients:
        count, x, weight = hidden.shape[0], self.gathered(hidden).to(self.dtype), weight.to(self.dtype)
        bias = None if bias is None else bias.to(self.dtype)
        for_hidden, for_weight, for_bias = needed
        d_hidden = torch.empty_like(x) if for_hidden else None
        d_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if for_weight else None
        d_bias = torch.zeros_like(weight[:, 0]) if for_bias else None
        # One chunk has all rows: its sums are whole, in 16 bits too.
        exact = weight.dtype in (torch.float32, torch.float64)
        summed = exact or self._length(weight, self._classes) >= len(x)
        by_rows = scales if for_hidden or (summed and any(needed)) else None
        if losses is not None or by_rows is not None:
            sums = (d_hidden, d_weight, d_bias) if summed else (d_hidden, None, None)
            self._add_rows(x, weight, bias, losses, lse, by_rows, sums)
        if not summed and (for_weight or for_bias):
            self._set_classes(x, weight, bias, lse, scales, d_weight, d_bias)
        return None if d_hidden is None else self.scattered(d_hidden, count), d_weight, d_bias

    def _add_rows(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        losses: Tensor | None,
        lse: Tensor,
        scales: Tensor | None,
        gradients: Gradients,
    ) -> None:
        d_hidden, d_weight, d_bias = gradients
        for rows, logits in self._products(x, weight.t(), bias, self._length(weight, self._classes), True):
            self._softmax(
                logits,
                self.target[rows],
                lse[rows],
                None if losses is None else losses[rows],
                None if scales is None else scales[rows],
                0,
            )
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight.addmm_(logits.t(), x[rows])
            if d_bias is not None:
                d_bias.add_(logits.sum(0))  # torch adds 16-bit numbers in float32

    def _set_classes(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lse: Tensor,
        scales: Tensor | None,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
    ) -> None:
        for classes, logits in self._products(x, weight.t(), bias, self._length(weight, len(x)), False):
            self._softmax(logits, self.target, lse, None, scales, classes.start)
            if d_weight is not None:
                torch.mm(logits.t(), x, out=d_weight[classes])
            if d_bias is not None:
                torch.sum(logits, 0, out=d_bias[classes])

    def _length(self, weight: Tensor, across: int) -> int:
        """Return how many rows of `across` classes, or classes of `across` rows, a chunk has."""
        size: int = weight.element_size()
        if weight.dtype == torch.float64:  # torch's operations hold this many copies at once
            size += (3 if self._softcap else 2) * size
        return max(1, self._chunk_bytes // (max(across, 1) * size))

    def _products(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, length: int, by_rows: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of the logits, all in the memory of the first."""
        count, other = (len(x), self._classes) if by_rows else (self._classes, len(x))
        memory = x.new_empty(min(length, count) * other)
        for begin in range(0, count, length):
            part = slice(begin, min(begin + length, count))
            everything = slice(None)
            rows, classes = (part, everything) if by_rows else (everything, part)
            left, right = x[rows], weight[:, classes]
            logits = memory[: len(left) * right.shape[1]].view(len(left), right.shape[1])
            if bias is None:
                torch.mm(left, right, out=logits)
            else:
                torch.addmm(bias[classes], left, right, out=logits)
            yield part, logits

    def _softmax(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        losses: Tensor | None,
        scales: Tensor | None,
        first: int,
    ) -> None:
        """Write lse and losses where losses are asked for; make logits their gradient where there are scales."""
        if isinstance(logits, FakeTensor):  # in place, and so nothing to estimate
            return
        if logits.dtype != torch.float64:
            if logits.is_cuda:
                kernels.prepare()
            _C.cross_entropy(
                logits, target, lse, losses, scales, first, self._classes, self._smoothing, self._softcap
            )
            return
        z = logits.clone()
        tangent = torch.tanh(z / self._softcap) if self._softcap else None
        if tangent is not None:
            z = tangent * self._softcap
        keep, flat = 1 - self._smoothing, self._smoothing / self._classes
        column = target - first
        here = (column >= 0) & (column < z.shape[1])
        column = column.clamp(0, z.shape[1] - 1)[:, None]
        if losses is not None:
            torch.logsumexp(z, 1, out=lse)
            torch.sub(lse, z.gather(1, column)[:, 0], alpha=keep, out=losses)
            if self._smoothing:
                losses.sub_(z.sum(1), alpha=flat)
        if scales is None:
            return
        z.sub_(lse[:, None]).exp_().sub_(flat)
        z.scatter_add_(1, column, -keep * here[:, None].to(z.dtype))
        z.mul_(scales[:, None])
        if tangent is not None:
            z.mul_(tangent.square_().neg_().add_(1))
        logits.copy_(z)
