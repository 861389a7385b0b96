"""Checks of what several functions take. Each error names the argument, what it is, and what to write instead."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memopt import _C

if TYPE_CHECKING:
    import torch


def size(value: Any, name: str) -> int:
    """Return an argument's bytes, given as an int or as text."""
    try:
        return _C.parse_size(value)
    except (TypeError, ValueError) as error:
        if not isinstance(value, str | int | float):  # whose repr may be long
            raise TypeError(f"{name}: a {type(value).__name__} is not a size: {_AS_SIZE}") from None
        raise type(error)(f"{name}: {error}") from None


_AS_SIZE = "give an int (bytes) or text such as '8GiB'"


def fraction_or_size(value: Any, name: str, total: Callable[[], int]) -> int:
    """Return an argument's bytes, given as a float, the fraction of a total, or as a size."""
    if not isinstance(value, float):
        return size(value, name)
    if not 0 < value <= 1:
        raise ValueError(
            f"{name}={value}: a float is a fraction of the memory, above 0 and at most 1; give bytes as an int, or a "
            "size such as '8GiB'"
        )
    return int(total() * value)


def budget(memory_budget: Any, device: torch.device) -> int:
    """Return a budget in bytes, given as a fraction of the device's memory (for a CPU the machine's) or as a size."""
    return fraction_or_size(memory_budget, "memory_budget", lambda: _memory_of(device))


def _memory_of(device: torch.device) -> int:
    import torch

    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total: int = torch.get_device_module(device.type).get_device_properties(device).total_memory
    return total


def directory(value: Any, name: str) -> str:
    """Return an argument's absolute path. Raises ValueError where no file can be made in that directory."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is {shown(value)}: give the path of a directory on a disk")
    path = os.path.abspath(os.fspath(value))
    try:
        _C.Disk(path)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    return path


def check_function(value: Any, name: str, of: str) -> None:
    """Raise TypeError if an argument cannot be called. of: what it is a function of, and what it returns."""
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}: give a function of {of}")


def check_module(value: Any, name: str, after: str = "") -> None:
    """Raise TypeError if an argument is no module."""
    import torch

    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} is {shown(value)}, expected a torch.nn.Module{after}")


def shown(value: Any) -> str:
    """Return a value as an error names it: short values by their repr, others by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"
