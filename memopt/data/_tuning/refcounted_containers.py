"""Containers of many small Python objects in a dataset: what a worker process copies by reading it, as reading writes
to reference counts."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any, NamedTuple

LEAST = 1000  # items of a container that is worth a line
_SAMPLE = 200  # items whose sizes stand for all
_DEPTH = 4
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Container(NamedTuple):
    """path: "dataset.samples"; nbytes: of the container and its items, from a sample of them."""

    path: str
    kind: str
    length: int
    items: str  # "str", "tuple", "mixed"
    nbytes: int

    @property
    def remedy(self) -> str:
        if self.kind == "dict":
            return f"{self.path} = memopt.data.SharedDict({self.path})"
        name = "SharedStrings" if self.items == "str" else "SharedList"
        given = self.path if self.kind in ("list", "tuple") else f"list({self.path})"
        return f"{self.path} = memopt.data.{name}({given})"


def containers_of(dataset: object, path: str = "dataset") -> list[Container]:
    """The largest first. Attributes are followed, and what is in lists and dicts of few items; no code of the data
    set's runs."""
    found: list[Container] = []
    seen: set[int] = set()
    ahead: list[tuple[str, Any, int]] = [(path, dataset, 0)]
    while ahead:
        where, value, depth = ahead.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            if len(value) >= LEAST:
                found.append(_measured(where, value))
            elif type(value) is dict:
                ahead += [(f"{where}[{key!r}]", one, depth + 1) for key, one in value.items()]
            elif type(value) in (list, tuple):
                ahead += [(f"{where}[{i}]", one, depth + 1) for i, one in enumerate(value)]
        elif not isinstance(value, type):
            ahead += [(f"{where}.{name}", one, depth + 1) for name, one in _attributes(value)]
    return sorted(found, key=lambda one: -one.nbytes)


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Those in its __dict__ and its slots, without asking a __getattr__."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        held = {}
    found = list(held.items()) if type(held) is dict else []
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if type(slot).__name__ == "member_descriptor":
                try:
                    found.append((name, slot.__get__(value)))
                except AttributeError:  # not set
                    continue
    return found


def _measured(path: str, value: Any) -> Container:
    count = len(value)
    if type(value) in (list, tuple):
        half = _SAMPLE // 2  # some in a row, as what alternates would hide from a stride; some from all over
        some = [*value[:half], *(value[i * count // half] for i in range(half))]
    else:
        some = list(islice(value.items() if type(value) is dict else value, _SAMPLE))
    if type(value) is dict:
        kinds = {type(one).__name__ for _, one in some}
        mean = sum(_size(key) + _size(one) for key, one in some) / len(some)
    else:
        kinds = {type(one).__name__ for one in some}
        mean = sum(map(_size, some)) / len(some)
    items = kinds.pop() if len(kinds) == 1 else "mixed"
    return Container(path, type(value).__name__, count, items, sys.getsizeof(value) + int(mean * count))


def _size(value: object, depth: int = 0) -> int:
    size = sys.getsizeof(value) if type(value).__module__ == "builtins" else 64
    if depth < _DEPTH and type(value) in _CONTAINERS:
        parts: Any = (
            [*value.keys(), *value.values()] if type(value) is dict else value  # type: ignore[attr-defined]
        )
        size += sum(_size(one, depth + 1) for one in islice(parts, 100))
    return size
