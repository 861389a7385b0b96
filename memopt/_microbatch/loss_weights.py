"""The weight of a micro-batch's loss in that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from memopt._microbatch.split_batch import SplitBatch

Reduction = Literal["mean", "sum"] | Callable[..., Any]


class Weights:
    """reduction: "mean" or "sum" over samples, or a function that gives what a micro-batch counts for in a mean."""

    def __init__(self, reduction: Reduction, split: SplitBatch) -> None:
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction={reduction!r}: expected 'mean', 'sum', or a function that counts what a micro-batch's loss "
                "is a mean over"
            )
        self.reduction, self._split = reduction, split
        self._counts: dict[tuple[int, int], Any] = {}

    @property
    def by_samples(self) -> bool:
        """A mean whose weights are the numbers of samples."""
        return self.reduction == "mean"

    def count(self, start: int, stop: int) -> Any:
        """The number that those samples count for, or a tensor of one."""
        if not callable(self.reduction):
            return stop - start
        key = (start, stop)
        if key not in self._counts:
            args, named = self._split.micro_batch(start, stop)
            with torch.no_grad():
                count = self.reduction(*args, **named)
            if isinstance(count, Tensor) and count.dim():
                raise ValueError(
                    f"memopt.backward: reduction= returned a tensor of shape {tuple(count.shape)} for {stop - start} "
                    "samples: reduce it to a scalar, the number that they count for: .sum()"
                )
            self._counts[key] = count
        return self._counts[key]

    def is_nothing(self, start: int, stop: int) -> bool:
        """True for zero weight (all tokens masked, say): there is no mean, and the micro-batch is left out.

        Waits for the device that has the count.
        """
        return callable(self.reduction) and not self._is_whole(start, stop) and not self.count(start, stop)

    def reduced(self, loss: Any, start: int, stop: int) -> Tensor:
        """The loss of a micro-batch, as the part of the whole batch's loss that it is."""
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"memopt.backward: fn returned a {type(loss).__qualname__}: it is to return the loss alone"
            )
        if loss.dim() == 0:
            return loss * self._weight(start, stop) if self._is_weighted(start, stop) else loss
        if loss.shape[0] != stop - start:
            raise ValueError(
                f"memopt.backward: fn returned a loss of shape {tuple(loss.shape)} for {stop - start} samples: reduce "
                "it to a scalar, or return a loss for each sample"
            )
        if self.reduction == "sum":
            return loss.sum()
        if callable(self.reduction):
            return loss.sum() / self.count(0, self._split.samples)
        mean = loss.mean()
        return mean * self._weight(start, stop) if self._is_weighted(start, stop) else mean

    def _is_whole(self, start: int, stop: int) -> bool:
        return start == 0 and stop == self._split.samples

    def _is_weighted(self, start: int, stop: int) -> bool:
        return self.reduction != "sum" and not self._is_whole(start, stop)

    def _weight(self, start: int, stop: int) -> Any:
        return self.count(start, stop) / self.count(0, self._split.samples)
