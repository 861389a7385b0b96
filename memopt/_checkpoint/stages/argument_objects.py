"""Objects among a stage's arguments that its run may change: a cache of keys and values, a record that is filled.

A run that comes again must find such an object as the first run did, and leave the caller's alone. It is given a copy:
of the object, of what its attributes and containers hold, and so on, but not of tensors, which keep their memory.
Only objects whose state is their `__dict__` are copied. What is reached that has another way to be copied, or none (a
module, a file, a lock), is the same in each run."""

from __future__ import annotations

import copy
from typing import Any

import torch

from memopt._checkpoint.stages.trace_forward import CONSTANTS
from memopt._runtime.state_snapshot import CONTAINERS, refill

# CPython's Py_TPFLAGS_IMMUTABLETYPE, of types that are written in C: a file has more than its attributes, which CPython
# 3.13 says only when it is pickled.
_IMMUTABLE = 1 << 8


def is_changeable(value: Any) -> bool:
    """Return whether the value is a plain object, or a container that pytree takes for a leaf."""
    kind: Any = type(value)
    return isinstance(value, CONTAINERS) or (
        hasattr(value, "__dict__")
        and not isinstance(value, (*CONSTANTS, torch.Tensor, torch.nn.Module))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__new__ is object.__new__
        and not any(base.__flags__ & _IMMUTABLE for base in kind.__mro__[:-1])
    )


class ArgumentObject:
    """An object as it is now, for later runs.

    tensors: those in it, which it keeps alive."""

    __slots__ = ("tensors", "value")

    def __init__(self, value: Any) -> None:
        copies = Copies()
        self.value = copies.of(value)
        self.tensors = copies.tensors

    def again(self) -> Any:
        return Copies().of(self.value)


class Copies:
    """Copies of objects that refer to each other: each is copied once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}  # the objects too, so that no other one has the identity
        self.tensors: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, torch.Tensor):
            # Without its graph, which is that of an earlier stage.
            made: Any = value if value.grad_fn is None else value.detach().requires_grad_()
            self.tensors.append(made)
        elif type(value) is tuple:
            made = tuple(map(self.of, value))
        elif is_changeable(value):
            return self.copy(value)
        else:
            return value
        self.known[id(value)] = value, made
        return made

    def copy(self, value: Any) -> Any:
        made = copy.copy(value)
        self.known[id(value)] = value, made
        if hasattr(made, "__dict__"):
            made.__dict__.update((name, self.of(part)) for name, part in vars(value).items())
        if isinstance(made, CONTAINERS):
            refill(made, self.contents(value))
        return made

    def contents(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        return set(map(self.of, value)) if isinstance(value, set) else list(map(self.of, value))
