"""The devices whose random and autocast state a checkpointed region depends on: its tensor arguments' and the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torchs
from torch.utils._pytree import tree_leaves

from memopt._checkpoint.drop_in.engine import ENGINE
from memopt._runtime.state_snapshot import generators


class Devices(NamedTuple):
    """The devices of a region's arguments."""

    autocast: str | None  # the type of device whose autocast is kept beside the CPU's
    generators: tuple[Any, ...]
    uninitialized: Any  # the device's module, where it may be initialized while the region runs


_CPU_ALONE = Devices("cpu", (torch.default_generator,), None)


def of(args: tuple[Any, ...]) -> Devices:
    """Find the devices as torch.utils.checkpoint does.

    Only tensors among the positional arguments count, at any depth. Without one off the CPU, the device type is the
    default, but none of its random states counts.
    """
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
