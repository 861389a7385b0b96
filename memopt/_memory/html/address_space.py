"""The addresses that blocks ever had, without the gaps between them.

A device's memory is a few ranges far apart, a process's many; a map of all addresses would show nothing. The widest
ranges that no block ever touched are therefore cut out, until the remaining gaps are together at most an eighth of the
touched ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mapped(NamedTuple):
    """Blocks in the shortened address space.

    offsets: of each block, in a space of `size` bytes. starts: the address of each range that was kept whole; at: its
    offset.
    """

    offsets: torch.Tensor
    size: int
    starts: list[int]
    at: list[int]


def shorten(address: torch.Tensor, size: torch.Tensor) -> Mapped:
    """Shorten the address space of blocks at `address` [n], `size` [n] bytes long. They may overlap in time."""
    if not len(address):
        return Mapped(address, 0, [], [])
    first = address.unique()  # ascending
    # The end of all that begins at or before each of these.
    ends = torch.zeros_like(first).scatter_reduce_(
        0, torch.searchsorted(first, address), address + size, "amax", include_self=False
    )
    ends = ends.cummax(0).values
    gaps = (first[1:] - ends[:-1]).clamp_(min=0)
    touched = int(ends[-1] - first[0]) - int(gaps.sum())
    smallest = gaps.sort().values
    kept = int((smallest.cumsum(0) <= touched // 8).sum())
    cut = gaps >= smallest[kept] if kept < len(gaps) else torch.zeros_like(gaps, dtype=torch.bool)
    removed = torch.zeros_like(first)
    removed[1:] = torch.where(cut, gaps, 0).cumsum(0)
    places = first - first[0] - removed
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), cut.nonzero().flatten() + 1))
    return Mapped(
        places[torch.searchsorted(first, address)],
        int(ends[-1] - first[0] - removed[-1]),
        first[begins].tolist(),
        places[begins].tolist(),
    )
