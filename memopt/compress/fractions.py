"""Shares of a whole, as arguments."""

from __future__ import annotations

import numbers
from typing import Any


def fraction(amount: Any, what: str = "amount") -> float:
    """A float within 0…1. Integers are refused: torch.nn.utils.prune takes them for a number of elements, so that 1
    could mean all or one."""
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(
            f"{what}={amount!r} is a {type(amount).__name__}: expected a float between 0 and 1, a share"
        )
    if isinstance(amount, numbers.Integral):
        raise TypeError(
            f"{what}={amount!r} is an integer: expected a share, a float between 0 and 1 ({what}={float(amount)})"
        )
    value = float(amount)
    if not 0.0 <= value <= 1.0:  # NaN is neither
        raise ValueError(f"{what}={amount!r}: expected a share, a float between 0 and 1")
    return value
