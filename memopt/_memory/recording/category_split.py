"""Bytes by category in one phrase. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping

_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
_LEAST = 0.01  # of all: a smaller part is not worth a name


def in_words(by_category: Mapping[str, int]) -> str:
    """Return "activations", or for several "activations 64.0 + optimizer 40.0 MiB": one unit, largest first."""
    whole = sum(by_category.values())
    parts = sorted(
        ((size, name) for name, size in by_category.items() if size > _LEAST * whole),
        key=lambda part: -part[0],
    )
    if len(parts) < 2:
        return parts[0][1] if parts else ""
    unit, shift = next((unit, shift) for unit, shift in _UNITS if parts[0][0] >> shift)
    digits = 0 if not shift else 2 if parts[0][0] >> shift < 10 else 1
    return " + ".join(f"{name} {size / (1 << shift):.{digits}f}" for size, name in parts) + f" {unit}"
