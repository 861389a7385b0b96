"""The state around a stage in the forward pass, and in its modules, for its later runs to find again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memopt.checkpointing import devices
from memopt.checkpointing.module_state import Changes, ModuleState


def accelerators(leaves: Iterable[Any]) -> dict[str, set[int]]:
    """Devices of these tensors that have a random state of their own: type -> indices."""
    found: dict[str, set[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            found.setdefault(leaf.device.type, set()).add(leaf.device.index or 0)
    return found


class StageState:
    """Random state of the CPU and of the arguments' devices, autocast of both, the default device, and what the stage's
    runs change in modules."""

    __slots__ = ("autocast", "default_device", "modules", "random")

    def __init__(self, leaves: Iterable[Any], changes: Changes) -> None:
        self.modules = ModuleState(changes)
        found = accelerators(leaves)
        generators = [torch.default_generator]
        for kind, indices in found.items():
            generators += devices.generators(torch.get_device_module(kind), sorted(indices))
        self.random = [(generator, generator.get_state()) for generator in generators]
        self.autocast = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", *found)
            if torch.amp.is_autocast_available(kind)
        ]
        self.default_device = torch.get_default_device()

    @property
    def nbytes(self) -> int:
        """Of host memory, for as long as the stage may run again."""
        return sum(state.nbytes for _, state in self.random)

    def ended(self) -> None:
        """The stage has run: a random state that it did not touch need not be kept (5 KB of host memory each)."""
        self.random = [
            (generator, state)
            for generator, state in self.random
            if not torch.equal(state, generator.get_state())
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """For as long as it lasts all is as it was then; afterwards as it was before."""
        with ExitStack() as stack:
            stack.enter_context(self.modules.again())
            for generator, state in self.random:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            yield
