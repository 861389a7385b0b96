"""A training step that survives out-of-memory errors: the batch runs again in micro-batches.

backward.py has memopt.backward and its loop; split_batch.py finds the samples, cuts them and weighs the parts' losses;
exactness.py says where micro-batches cannot equal the whole; attempt.py runs one and gives back what a failed one has
changed; size_cache.py chooses sizes, by the memory that there is and by what fitted before.

Ranks that train one model together have to agree, or one waits in a collective for another that runs out. They do so by
an Agreement; memopt.backward calls it, on every rank, in this order:

- `count = agreement.micro_batches(wanted, most)`, before the first forward of an attempt
- `with agreement.micro_batch(index, count)`, around the forward and the backward of each; an out-of-memory error of
  this rank ends the loop, on this rank alone
- `agreement.succeeded(ok, why)`: True if all ranks did; else each gives back what it has, and all begin again
- `agreement.reduce(parameters)`, once, after the attempt that succeeded

So a rank that runs out of memory is heard of in succeeded(), and nothing in the loop may be a collective unless
micro_batches() has made sure that nobody will run out. The next wanted is at least twice the count that failed
anywhere. rank_protocol.of_model() makes the one for a model, where agreement= is not given; a process alone needs none
(ALONE).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Agreement(Protocol):
    """The protocol by which ranks agree. Every rank calls every method equally often."""

    def micro_batches(self, wanted: int, most: int) -> int:
        """Return the number of micro-batches into which all ranks split their batch: the largest `wanted` of any rank.

        Args:
            wanted: The number that this rank needs.
            most: The number of this rank's samples. A number of micro-batches that some rank cannot have is an error on
                every rank.
        """

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        """Return the context that a micro-batch runs in, such as DDP's no_sync.

        Args:
            index: The number of the micro-batch, from 0.
            count: The number of micro-batches.
        """

    def succeeded(self, ok: bool, why: str = "") -> bool:
        """Return whether every rank's attempt succeeded. Raises if all ranks have to end.

        Args:
            ok: Whether this rank's attempt succeeded.
            why: The error with which this rank's attempt failed.
        """

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reduce the gradients of all micro-batches, in .grad, over the ranks, unless they are reduced already.

        Args:
            parameters: The model's parameters.
        """


class Alone:
    """The agreement of a process with itself."""

    def micro_batches(self, wanted: int, most: int) -> int:
        return wanted

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        return nullcontext()

    def succeeded(self, ok: bool, why: str = "") -> bool:
        return ok

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        pass


ALONE = Alone()
