"""What an optimizer's states of 32 bits would save in 8: memopt.optim.AdamW(..., state_bits=8)."""

from __future__ import annotations

_BLOCK = 256  # elements that share a scale of 32 bits


def saved(nbytes: int) -> int:
    """Bytes, of so many of states in 32 bits."""
    return round(nbytes * (1 - (1 + 4 / _BLOCK) / 4))
