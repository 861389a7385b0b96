"""Operators that are made of others, under a dispatch mode that is to see those."""

from __future__ import annotations

from typing import Any

from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_WHOLE = (DispatchKey.CompositeExplicitAutograd, DispatchKey.CUDA)  # implementations that call operators


def run_under(mode: TorchDispatchMode, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
    """Return a higher-order operator's result, its operators dispatched to the mode; NotImplemented if it has none."""
    found = next((func.py_kernels[key] for key in _WHOLE if key in func.py_kernels), None)
    if found is None:
        return NotImplemented
    _push_mode(mode)  # not `with mode`, whose __enter__ may begin something
    try:
        return found(*args, **kwargs)
    finally:
        _pop_mode()
