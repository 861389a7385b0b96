"""The random states that a step draws from, as they were when it began."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from memopt.checkpointing.devices import generators


class RandomState:
    """Of the CPU, of accelerators (every CUDA device in use where `devices` is None), of Python's random and, where
    NumPy is loaded, of its global state. Generators that a program made for itself are its own."""

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        indices: dict[str, list[int]] = {}
        for device in _cuda_devices() if devices is None else devices:
            if device.type not in ("cpu", "meta"):
                indices.setdefault(device.type, []).append(device.index or 0)
        self._generators: list[Any] = [torch.default_generator]
        for kind, found in indices.items():
            self._generators += generators(getattr(torch, kind), found)
        self._states = [generator.get_state() for generator in self._generators]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def was_drawn_from(self) -> bool:
        """Since then, or since the last restore()."""
        pairs = zip(self._generators, self._states, strict=True)
        if not all(torch.equal(generator.get_state(), state) for generator, state in pairs):
            return True
        if random.getstate() != self._python:
            return True
        return self._numpy is not None and _differ(sys.modules["numpy"].random.get_state(), self._numpy)


def _differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Of NumPy's states, whose second element is an array."""
    return one[2:] != other[2:] or bool((one[1] != other[1]).any())


def _cuda_devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [torch.device("cuda", index) for index in range(count)]
