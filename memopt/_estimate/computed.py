"""A reference run of a script without guesses: every operation is computed, and the host reads the device's own values.

Estimates are compared with it, at sizes that the host can compute.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt._estimate.guesses import Guesses
from memopt._estimate.host_reads import HostReads
from memopt.sim._compute import SHAPE_FROM_VALUES, Compute
from memopt.sim._host_tensors import alias

_aten = torch.ops.aten

_INDEX = _aten.index.Tensor  # it finds out for itself what a mask selects, and takes memory for it
_ANSWERED = SHAPE_FROM_VALUES - {_INDEX}


class _DeviceValues:
    """The interface of HostShadows for a device that keeps values."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize(tensor.device)
        return alias(tensor)

    def drawn(self, tensor: torch.Tensor) -> bool:
        return False

    def put(self, tensor: torch.Tensor, values: torch.Tensor, *, made: bool) -> None:
        alias(tensor).copy_(values)


class Computed(Compute):
    def __init__(self) -> None:
        super().__init__()
        self._reads = HostReads(_DeviceValues(), Guesses())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERED:
            return func(*args, **(kwargs or {}))
        if func is _INDEX:
            return self.computed(func, args, kwargs or {})
        with self._reads.checks(func.overloadpacket):  # the CPU checks the values
            return super().__torch_dispatch__(func, types, args, kwargs)
