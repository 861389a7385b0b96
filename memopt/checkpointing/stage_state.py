"""What a stage finds around it in the forward pass, for its later runs to find again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase


def accelerators(leaves: Iterable[Any]) -> dict[str, set[int]]:
    """Devices of these tensors that have a random state of their own: type -> indices."""
    found: dict[str, set[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            found.setdefault(leaf.device.type, set()).add(leaf.device.index or 0)
    return found


class StageState:
    """Random state of the CPU and of the arguments' devices, autocast of both, and the default device."""

    __slots__ = ("autocast", "cpu_random", "default_device", "devices", "random")

    def __init__(self, leaves: Iterable[Any]) -> None:
        self.devices = accelerators(leaves)
        self.cpu_random: torch.Tensor | None = torch.get_rng_state()
        self.random = self.states()
        self.autocast = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", *self.devices)
            if torch.amp.is_autocast_available(kind)
        ]
        self.default_device = torch.get_default_device()

    def states(self) -> dict[tuple[str, int], torch.Tensor]:
        return {
            (kind, index): torch.get_device_module(kind).get_rng_state(index)
            for kind, indices in self.devices.items()
            for index in sorted(indices)
        }

    @property
    def nbytes(self) -> int:
        """Of host memory, for as long as the stage may run again."""
        states = [*self.random.values(), *([] if self.cpu_random is None else [self.cpu_random])]
        return sum(state.nbytes for state in states)

    def ended(self) -> None:
        """The stage has run: a random state that it did not touch need not be kept (5 KB of host memory each)."""
        if self.cpu_random is not None and torch.equal(self.cpu_random, torch.get_rng_state()):
            self.cpu_random = None
        now = self.states()
        self.random = {key: state for key, state in self.random.items() if not torch.equal(state, now[key])}

    @contextmanager
    def again(self) -> Iterator[None]:
        """For as long as it lasts all is as it was then; afterwards as it was before."""
        with ExitStack() as stack:
            if self.cpu_random is not None:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.cpu_random)
            for (kind, index), state in self.random.items():
                module = torch.get_device_module(kind)
                stack.callback(module.set_rng_state, module.get_rng_state(index), index)
                module.set_rng_state(state, index)
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            yield


def normalizations(module: torch.nn.Module) -> tuple[_NormBase, ...]:
    """The modules in it whose running statistics a forward pass in training mode changes."""
    return tuple(m for m in module.modules() if isinstance(m, _NormBase))


@contextmanager
def statistics_kept(modules: Iterable[_NormBase]) -> Iterator[dict[int, torch.Tensor]]:
    """Batch statistics are taken once, in the forward pass: a stage that runs again changes copies of them. Gives the
    buffers by the address of their copy's storage: a graph that saves a copy (and uses none of it in training mode)
    can have the buffer."""
    kept = []
    copies: dict[int, torch.Tensor] = {}
    try:
        for module in modules:
            if module.training and module.track_running_stats:
                kept.append((module, dict(module._buffers)))
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        copy = module._buffers[name] = buffer.clone()
                        copies[copy.untyped_storage()._cdata] = buffer
        yield copies
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)
