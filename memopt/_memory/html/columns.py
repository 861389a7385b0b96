"""Columns of a recording, as a page has them: addresses without the gaps between them, integers in few bytes."""

from __future__ import annotations

import base64
import zlib
from typing import NamedTuple

import torch

# ---- the addresses, without the gaps ---------------------------------------------------------------------------------
# A device's memory is a few ranges far apart, a process's many; a map of all addresses would show nothing. The widest
# ranges that no block ever touched are therefore cut out, until the remaining gaps are together at most an eighth of
# the touched ranges.


class ShortenedAddresses(NamedTuple):
    """Blocks in the shortened address space.

    offsets: of each block, in a space of `size` bytes. starts: the address of each range that was kept whole; at: its
    offset.
    """

    offsets: torch.Tensor
    size: int
    starts: list[int]
    at: list[int]


def shorten_addresses(address: torch.Tensor, size: torch.Tensor) -> ShortenedAddresses:
    """Shorten the address space of blocks at `address` [n], `size` [n] bytes long. They may overlap in time."""
    if not len(address):
        return ShortenedAddresses(address, 0, [], [])
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
    return ShortenedAddresses(
        places[torch.searchsorted(first, address)],
        int(ends[-1] - first[0] - removed[-1]),
        first[begins].tolist(),
        places[begins].tolist(),
    )


# ---- columns of integers in few bytes --------------------------------------------------------------------------------
# A column is written as its differences if it never falls (times, births), else as offsets from its minimum; first the
# lowest byte of every number, then the next byte of every number, as many as the largest number needs. Such planes are
# long runs and repetitions, which deflate makes small, and a page adds them up again without parsing anything. All
# planes of all columns are one zlib stream, in base64. columns.js is the other half.


EXACT = 2**53  # above it a page's numbers are not integers any more


class Packed(NamedTuple):
    """Packed columns. `columns`: by name, how to read the column back. `base64`: the planes."""

    columns: dict[str, dict[str, int | bool]]
    base64: str


def _memory_of(tensor: torch.Tensor) -> bytearray:
    """A tensor's memory, without NumPy."""
    content = bytearray(tensor.numel() * tensor.element_size())
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.flatten())
    return content


def _planes(numbers: torch.Tensor, count: int) -> bytearray:
    """The lowest `count` bytes of each number, byte by byte: [count, n]."""
    parts = numbers.contiguous().view(torch.uint8).view(-1, 8)
    return _memory_of(parts[:, :count].t().contiguous())


def pack_columns(columns: dict[str, torch.Tensor]) -> Packed:
    """Pack int64 columns of any lengths. Raise ValueError for a number that a page cannot hold."""
    described: dict[str, dict[str, int | bool]] = {}
    content = bytearray()
    for name, column in columns.items():
        if not len(column):
            described[name] = {"count": 0, "planes": 0, "low": 0, "differences": False, "high": 0}
            continue
        low, high = int(column.min()), int(column.max())
        if max(abs(low), abs(high)) > EXACT:
            raise ValueError(
                f"column {name!r} goes from {low} to {high}: a page can hold only integers up to "
                "2**53 exactly"
            )
        steps = column.diff(prepend=column[:1])
        rises = bool((steps >= 0).all())
        numbers = steps if rises else column - low
        planes = (int(numbers.max()).bit_length() + 7) // 8
        described[name] = {
            "count": len(column),
            "planes": planes,
            "low": low,
            "differences": rises,
            "high": high,
        }
        content += _planes(numbers, planes)
    return Packed(described, base64.b64encode(zlib.compress(content, 6)).decode())
