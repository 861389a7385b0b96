"""Leaves of a batch: its tensors, and objects that go to a device by a method of their own, however they are nested.

Containers are dicts and other mappings, tuples and named tuples, lists and other sequences that can be written to, and
dataclasses. A container in which nothing changes is given back as it is; what holds no tensor is left alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, type(None))


def moves_itself(value: object) -> bool:
    """Whether it goes to a device by its method `to`. A mapping does only if it can be pinned too: the others' `to` is
    that of all their values (Hugging Face's BatchEncoding), which are better moved one by one."""
    if isinstance(value, type) or not callable(getattr(value, "to", None)):
        return False
    return not isinstance(value, Mapping) or callable(getattr(value, "pin_memory", None))


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The batch with change(path, leaf) in the place of each leaf: a tensor or what moves itself. path: the keys,
    indices and field names that lead there, with dots between; a batch that is itself a leaf has "". One that is met
    twice is asked for twice."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor) or moves_itself(value):
        return change(path, value)
    if isinstance(value, Mapping):
        return _mapping(value, _changed(value.items(), change, path))
    if isinstance(value, tuple):
        found = _changed(enumerate(value), change, path)
        return _tuple(value, found) if found else value
    if isinstance(value, MutableSequence) and not isinstance(value, bytearray):
        return _written(value, _changed(enumerate(value), change, path))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _dataclass(value, _changed(((name, getattr(value, name)) for name in names), change, path))
    return value


def _changed(
    items: Iterable[tuple[Any, Any]], change: Callable[[str, Any], Any], path: str
) -> dict[Any, Any]:
    """Those of the items that are another object afterwards."""
    before = f"{path}." if path else ""
    found = {}
    for key, value in items:
        new = mapped(value, change, f"{before}{key}")
        if new is not value:
            found[key] = new
    return found


def _mapping(value: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
    if not found:
        return value
    if type(value) is dict:
        return {**value, **found}
    if isinstance(value, MutableMapping):
        return _written(value, found)
    return type(value)({**value, **found})  # type: ignore[call-arg]


def _tuple(value: tuple[Any, ...], found: dict[int, Any]) -> Any:
    new = [found.get(i, old) for i, old in enumerate(value)]
    make = getattr(value, "_make", None)  # of named tuples
    return make(new) if make is not None else type(value)(new)


def _written(value: Any, found: dict[Any, Any]) -> Any:
    if found:
        value = copy.copy(value)
        for key, new in found.items():
            value[key] = new
    return value


def _dataclass(value: Any, found: dict[str, Any]) -> Any:
    if found:
        value = copy.copy(value)
        for name, new in found.items():
            object.__setattr__(value, name, new)  # frozen ones, too
    return value
