"""Whose random states a checkpointed region depends on, and whose autocast: of the devices of its tensor arguments,
and of the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torchs
from torch.utils._pytree import tree_leaves

from memopt.checkpointing.engine import ENGINE


class Generator:
    """Of a device whose module knows no generators: get_state() and set_state() are the module's."""

    def __init__(self, module: Any, index: int) -> None:
        self.module, self.index = module, index

    def get_state(self) -> torch.Tensor:
        with self.module.device(self.index):
            state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_state(self, state: torch.Tensor) -> None:
        with self.module.device(self.index):
            self.module.set_rng_state(state)


class Devices(NamedTuple):
    """Of a region's arguments."""

    autocast: str | None  # the type of device whose autocast is kept beside the CPU's
    generators: tuple[Any, ...]
    uninitialized: Any  # the device's module, where it may be initialized while the region runs


_CPU_ALONE = Devices("cpu", (torch.default_generator,), None)


def of(args: tuple[Any, ...]) -> Devices:
    """As torch.utils.checkpoint finds them: only tensors among the positional arguments count, on whatever level.
    Without any that is not on the CPU it is the default type of device, but no random state of it."""
    if ENGINE.only_cpu(args):
        kind = torchs.DefaultDeviceType._default_device_type or torchs.DefaultDeviceType.get_device_type()
        return _CPU_ALONE if kind == "cpu" else _of_type(kind, ())
    tensors = [
        leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
    ]
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) == 1:
        (kind,) = kinds
    else:  # none, or more than one, of which torch warns
        kind = torchs._infer_device_type(*args)
    if kind == "cpu":
        return _CPU_ALONE
    return _of_type(kind, [tensor.get_device() for tensor in tensors if tensor.device.type != "meta"])


def _of_type(kind: str, indices: Iterable[int]) -> Devices:
    if kind == "meta":
        return Devices(None, (torch.default_generator,), None)
    module = getattr(torch, kind)
    autocast = kind if torch.amp.is_autocast_available(kind) else None
    if not getattr(module, "_initialized", False):
        return Devices(autocast, (torch.default_generator,), module)
    return Devices(autocast, (torch.default_generator, *generators(module, dict.fromkeys(indices))), None)


def generators(module: Any, indices: Iterable[int]) -> list[Any]:
    """Of these devices of a module like torch.cuda."""
    known = getattr(module, "default_generators", ())
    return [known[index] if index < len(known) else Generator(module, index) for index in indices]
