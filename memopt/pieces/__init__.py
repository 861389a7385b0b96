"""A training step that does not die of an out of memory: the batch runs again in pieces.

step.py has memopt.backward and its loop; split_batch.py finds the samples and cuts them; exactness.py says where pieces
cannot equal the whole; entry_state.py is what an attempt that failed gives back; attempt.py runs a piece, and leaves
nothing of one that failed; known_sizes.py remembers what fitted; room.py is how much memory there is.

Ranks that train one model together have to agree, or one waits in a collective for another that runs out. What they say
to each other is an Agreement; memopt.backward calls it, on every rank, in this order:

    count = agreement.pieces(wanted, most)          before the first forward of an attempt
    for index in range(count):
        with agreement.piece(index, count):         around the forward and the backward of a piece
            …                                       an out of memory of this rank ends the loop, on this rank alone
    if agreement.succeeded(ok, why): break          all ranks did; else each gives back what it has; all begin again
    agreement.reduce(parameters)                    once, after the attempt that succeeded

So a rank that runs out of memory is heard of in succeeded(), and nothing in the loop may be a collective unless
pieces() has made sure that nobody will run out. The next wanted is at least twice the count that failed anywhere.
agreement.of_model() makes the one for a model, where agreement= is not given; a process alone needs none (ALONE)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Agreement(Protocol):
    """Between ranks. Every method is called by every rank equally often."""

    def pieces(self, wanted: int, most: int) -> int:
        """How many pieces all ranks cut their batch into: the greatest `wanted` of any. most: this rank's samples, of
        which none may be cut; a number that some rank cannot have is an error on every rank."""

    def piece(self, index: int, count: int) -> AbstractContextManager[object]:
        """What piece `index` of `count` runs in: DDP's no_sync, for one."""

    def succeeded(self, ok: bool, why: str = "") -> bool:
        """Whether every rank's attempt did. why: what this one's failed with. Raises where all have to end."""

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of all pieces, in .grad, become those of all ranks where they are not yet."""


class Alone:
    """The agreement of a process with itself."""

    def pieces(self, wanted: int, most: int) -> int:
        return wanted

    def piece(self, index: int, count: int) -> AbstractContextManager[object]:
        return nullcontext()

    def succeeded(self, ok: bool, why: str = "") -> bool:
        return ok

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        pass


ALONE = Alone()
