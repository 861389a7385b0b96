"""Attribution of blocks to categories by the tensors' owners: an optimizer its states, a module its parameters.

An attribution says that at some moment a tensor at this address was of this category. The block that lived there then
gets the category for its whole life. An attribution therefore acts backwards, and a gradient counts as one from its
first byte on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import torch

from memopt._memory.recording.recording import OTHER


def column(values: array[int]) -> torch.Tensor:
    """A copy, which leaves the array free to grow."""
    return (
        torch.frombuffer(values, dtype=torch.int64).clone() if values else torch.empty(0, dtype=torch.int64)
    )


class Attributions:
    """The attributions of one device. A position is the number of births and deaths there so far."""

    def __init__(self) -> None:
        self._positions = array("q")
        self._addresses = array("q")
        self._categories = array("q")

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, position: int, addresses: Iterable[int], category: int) -> None:
        before = len(self._addresses)
        self._addresses.extend(addresses)
        added = len(self._addresses) - before
        self._positions.extend(array("q", [position]) * added)
        self._categories.extend(array("q", [category]) * added)

    def forget(self, position: int) -> None:
        """Drop attributions from before a position, whose events are gone too."""
        gone = bisect_left(self._positions, position)  # they were made in order
        for column in (self._positions, self._addresses, self._categories):
            del column[:gone]

    def categories(
        self, born: torch.Tensor, died: torch.Tensor, address: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Return each block's category, OTHER where none is attributed.

        first: the position of the blocks' event 0. Of several attributions of a block the first category of all counts.
        """
        found = torch.full_like(born, OTHER)
        if not len(born) or not len(self):
            return found
        after = column(self._positions) - first - 1  # the event after which it was attributed
        attributed, category = column(self._addresses), column(self._categories)
        known = after >= -1
        after, attributed, category = after[known], attributed[known], category[known]
        # The last block born at that address by then: blocks and attributions on one scale, by address, then time.
        places = address.unique()
        span = int(torch.cat((died, after, born)).max()) + 3
        block_key = torch.searchsorted(places, address) * span + born + 1
        sorted_keys, order = block_key.sort()
        place = torch.searchsorted(places, attributed).clamp(max=len(places) - 1)
        at = torch.searchsorted(sorted_keys, place * span + after + 1, right=True) - 1
        block = order[at.clamp(min=0)]
        right = (at >= 0) & (address[block] == attributed) & (died[block] > after) & (born[block] <= after)
        return found.scatter_reduce(0, block[right], category[right], "amin")
