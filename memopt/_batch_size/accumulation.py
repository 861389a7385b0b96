"""Gradient accumulation that keeps the effective batch, the ragged end included.

Mean losses of micro-batches are not to be averaged: a mean over n samples is the sum of n_i / n times the means over
its micro-batches of n_i. Weighted so, the gradients are those of one batch of n; where a loss is a mean over something
else than samples, as over the tokens that are no padding, that is what has to be counted (`count`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Count = Callable[[Any], int]


@dataclass(frozen=True)
class Accumulation:
    """Gradient accumulation: steps of `effective` samples, in batches of at most `batch_size` on each of `ranks`.

    Args:
        effective: Samples in a step, over all ranks.
        batch_size: The most samples on a device at once.
        ranks: The number of ranks.

    Raises:
        ValueError: A number is below 1, or a rank would have no sample.

    Examples:
        >>> accumulation = Accumulation(effective=512, batch_size=found.batch_size)
        >>> for group in accumulation.groups(loader):  # the loader's batches are of batch_size
        ...     for (x, y), weight in group:
        ...         (loss_fn(model(x.cuda()), y.cuda()) * weight).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    effective: int
    batch_size: int
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("effective", "batch_size", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: write 1 or more")
        if self.effective % self.ranks:
            raise ValueError(
                f"effective={self.effective} samples cannot be divided equally among {self.ranks} ranks: gradients, "
                "which are averaged over ranks, would be weighted wrongly"
            )

    @property
    def steps(self) -> int:
        """The number of accumulated batches: ceil(effective / ranks / batch_size)."""
        return math.ceil(self.effective // self.ranks / self.batch_size)

    @property
    def sizes(self) -> list[int]:
        """The size of each accumulated batch, as nearly equal as possible; none is larger than batch_size."""
        whole, steps = self.effective // self.ranks, self.steps
        return [whole // steps + (number < whole % steps) for number in range(steps)]

    def micro_batches(self, *batch: Any) -> Iterator[tuple[Any, float]]:
        """Split a batch of any size into nearly equal micro-batches of at most batch_size.

        Args:
            *batch: Tensors, or containers of them. Tensors with the same first dimension as the first one are split
                (into views, not copies); everything else is passed to every micro-batch.

        Yields:
            A micro-batch (a part of the argument if there is only one, else a tuple) and its weight; the sum is 1.

        Raises:
            ValueError: There is no tensor with a first dimension, or it is empty.
        """
        leaves, form = pytree.tree_flatten(batch)
        size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        if not size:
            raise ValueError("no tensor has samples in its first dimension")
        count, first = math.ceil(size / self.batch_size), 0
        for number in range(count):
            length = size // count + (number < size % count)
            cut = [
                leaf.narrow(0, first, length)
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
                else leaf
                for leaf in leaves
            ]
            micro_batch = pytree.tree_unflatten(cut, form)
            yield (micro_batch[0] if len(batch) == 1 else micro_batch), length / size
            first += length

    def pieces(self, *batch: Any) -> Iterator[tuple[Any, float]]:
        """Call micro_batches() by its former name.

        Args:
            *batch: As micro_batches() takes it.
        """
        warnings.warn("Accumulation.pieces() is now named micro_batches()", DeprecationWarning, stacklevel=2)
        return self.micro_batches(*batch)

    def groups(self, loader: Iterable[Any], count: Count | None = None) -> Iterator[list[tuple[Any, float]]]:
        """Group a loader's batches, `steps` at a time.

        A group is read whole before it is yielded, since its weights depend on all of it: keep the batches on the host
        until they run.

        Args:
            loader: The batches.
            count: Returns how many terms the loss of a batch is the mean of; by default the number of its samples.

        Yields:
            Batches, each with its weight. Weights add up to 1 in every group, also in the last one, where the loader
            may end within a group or with a smaller batch.

        Raises:
            ValueError: The count of a group is 0.
        """
        count = count or _samples
        group: list[Any] = []
        for batch in loader:
            group.append(batch)
            if len(group) == self.steps:
                yield _weighted(group, count)
                group = []
        if group:
            yield _weighted(group, count)


def _weighted(group: list[Any], count: Count) -> list[tuple[Any, float]]:
    counts = [count(batch) for batch in group]
    if min(counts) < 0 or not sum(counts):
        raise ValueError(f"the loss is a mean over {counts}, which gives no weights")
    return [(batch, n / sum(counts)) for batch, n in zip(group, counts, strict=True)]


def _samples(batch: Any) -> int:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ValueError("no tensor has samples in its first dimension: pass count=")
