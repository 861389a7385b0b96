"""Bytes of an optimizer's states in 8 bits: memopt.optim.AdamW(..., state_bits=8)."""

from __future__ import annotations

from memopt.optim._state_layout import BLOCK

LEAST = 4096  # elements of a parameter whose states have 8 bits: min_8bit_size


def state_bytes(elements: int, element_size: int) -> list[int]:
    """Return the bytes of each tensor of one moment of a parameter: codes and scales, or the moment itself."""
    if elements < LEAST:
        return [elements * element_size]
    return [elements, 4 * -(-elements // BLOCK)]
