"""Shares of a whole, as arguments."""

from __future__ import annotations

import numbers
from typing import Any


def fraction(amount: Any, what: str = "amount") -> float:
    """Check a share, a float within 0…1.

    Integers are refused: torch.nn.utils.prune takes them for a number of elements, so that 1 could mean all or one.
    """
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(
            f"{what}={amount!r} is a {type(amount).__name__}: expected a float between 0 and 1, a share"
        )
    if isinstance(amount, numbers.Integral):
        raise TypeError(
            f"{what}={amount!r} is an integer: expected a share, a float between 0 and 1{_proposed(amount, what)}"
        )
    value: Any = amount  # not a float yet: a Fraction may be too large for one
    if not 0 <= value <= 1:  # NaN is neither
        raise ValueError(
            f"{what}={amount!r}: expected a share, a float between 0 and 1{_proposed(amount, what)}"
        )
    return float(value)


def _proposed(amount: Any, what: str) -> str:
    """The share that was likely meant: a number from 2 to 100 is a percentage. Empty where there is none."""
    if 2 <= amount <= 100:
        return f" ({what}={float(amount) / 100:g})"
    return f" ({what}={float(amount)})" if 0 <= amount <= 1 else ""
