"""What an operator takes and returns: tensors and other values in lists, tuples and dictionaries.

A dispatch mode goes over them with each operator, for which torch.utils._pytree, which knows more containers, takes
twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(value: object) -> list[Any]:
    """Return what is in the containers, in order."""
    found: list[Any] = []
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, tuple | list):
            rest += reversed(one)
        elif isinstance(one, dict):
            rest += reversed(one.values())
        else:
            found.append(one)
    return found


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the containers anew with each leaf changed; a named tuple becomes a tuple."""
    if isinstance(value, tuple):
        return tuple([map_leaves(change, one) for one in value])
    if isinstance(value, list):
        return [map_leaves(change, one) for one in value]
    if isinstance(value, dict):
        return {key: map_leaves(change, one) for key, one in value.items()}
    return change(value)
