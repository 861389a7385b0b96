"""print(tensor) with the tensor's values.

torch makes a tensor's text with all modes off, on the tensor's own device. A mode that computes must be on again there.
"""

from __future__ import annotations

import threading
from typing import Any

import torch._tensor_str as tensor_str

_entered = threading.local()  # modes: those of this thread, the innermost last
_text_of = tensor_str._tensor_str


def entered(mode: Any) -> None:
    """Note that this thread has entered a mode under which tensors on cuda have values."""
    tensor_str._tensor_str = _computed  # type: ignore[assignment]
    _entered.modes = [*_modes(), mode]


def left() -> None:
    _entered.modes = _modes()[:-1]


def _modes() -> list[Any]:
    return getattr(_entered, "modes", [])


def _computed(tensor: Any, indent: int) -> str:
    if not (_modes() and tensor.is_cuda):
        return _text_of(tensor, indent)  # type: ignore[no-any-return,no-untyped-call]
    with _modes()[-1]:
        return _text_of(tensor, indent)  # type: ignore[no-any-return,no-untyped-call]
