"""Columns of integers, packed into few bytes for a page: a million numbers that need no parsing.

A column is written as its differences if it never falls (times, births), else as offsets from its minimum; first the
lowest byte of every number, then the next byte of every number, as many as the largest number needs. Such planes are
long runs and repetitions, which deflate makes small, and a page adds them up again without parsing anything. All planes
of all columns are one zlib stream, in base64. columns.js is the other half.
"""

from __future__ import annotations

import base64
import zlib
from typing import NamedTuple

import torch

EXACT = 2**53  # above it a page's numbers are not integers any more


class Packed(NamedTuple):
    """Packed columns. `columns`: by name, how to read the column back. `base64`: the planes."""

    columns: dict[str, dict[str, int | bool]]
    base64: str


def _bytes(tensor: torch.Tensor) -> bytearray:
    """A tensor's memory, without NumPy."""
    content = bytearray(tensor.numel() * tensor.element_size())
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.flatten())
    return content


def _planes(numbers: torch.Tensor, count: int) -> bytearray:
    """The lowest `count` bytes of each number, byte by byte: [count, n]."""
    parts = numbers.contiguous().view(torch.uint8).view(-1, 8)
    return _bytes(parts[:, :count].t().contiguous())


def pack(columns: dict[str, torch.Tensor]) -> Packed:
    """Pack int64 columns of any lengths. Raise ValueError for a number that a page cannot hold."""
    described: dict[str, dict[str, int | bool]] = {}
    content = bytearray()
    for name, column in columns.items():
        if not len(column):
            described[name] = {"count": 0, "planes": 0, "low": 0, "differences": False, "high": 0}
            continue
        low, high = int(column.min()), int(column.max())
        if max(abs(low), abs(high)) > EXACT:
            raise ValueError(f"column {name!r} goes from {low} to {high}: a page holds at most 2**53 exactly")
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
