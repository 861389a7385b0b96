"""Host tensors without contents: what a model keeps on the host of a card that keeps none.

offload_layers moves parameters and their gradients to the host, where the optimizer steps them, and has its states. An
estimate needs none of these values, and a host that has not the memory for them can plan for one that has. So an
operation of such tensors gives tensors whose pages nobody touches, and writes nothing. What it would have
written to has no known contents afterwards. In a backward pass, where no mode is on, gradients are added up for real.
Optimizer states on a disk are not written either: their bytes are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._offload import host_parameters
from memopt._runtime.operands import map_leaves
from memopt.optim import _disk_states
from memopt.optim._one_pass import OnePass
from memopt.sim._compute import ON_HOST

_NO_SUCH_SHAPE = (NotImplementedError, RuntimeError)  # of an operation that meta tensors do not have


class HostTensors:
    """The tensors without contents, by their storages.

    Attributes:
        peak: The most bytes that operations have made of them at once, such as an optimizer's states.
        disk_peak: The most bytes that optimizers' states have taken of disks at once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._made_bytes = self.peak = self.disk_peak = 0
        self._disks: weakref.WeakSet[_BlankDisk] = weakref.WeakSet()

    def install(self, mode: TorchDispatchMode) -> None:
        """Add what offload_layers moves to the host from now on, and leave memopt's optimizers' work on it undone.

        Args:
            mode: Sees the operations, those of steps within a backward pass too.
        """
        cut, run, step_alone = host_parameters.cut, OnePass._run, OnePass.step_alone

        def cut_and_add(buffer: object, like: torch.Tensor, offset: int) -> torch.Tensor:
            tensor = cut(buffer, like, offset)
            self.add(tensor)
            return tensor

        def run_elsewhere(optimizer: OnePass, number: int, *args: Any) -> None:
            stepped = (p for group in optimizer.param_groups for p in group["params"])
            if number >= 0 or not self.among(stepped):
                run(optimizer, number, *args)

        def step_under_mode(optimizer: OnePass, *args: Any) -> None:
            with mode:
                step_alone(optimizer, *args)

        torch.utils.deterministic.fill_uninitialized_memory = False  # it would touch the pages
        OnePass.step_alone = step_under_mode  # type: ignore[assignment, method-assign]
        host_parameters.cut = cut_and_add
        _disk_states.StateFile.open = lambda *_: _BlankDisk(self)  # type: ignore[assignment, return-value, method-assign]
        _disk_states.file_block = lambda *_: self  # type: ignore[assignment, attr-defined]
        OnePass._run = run_elsewhere  # type: ignore[assignment, method-assign]

    def count_disks(self, disk: _BlankDisk) -> None:
        self._disks.add(disk)
        self.disk_peak = max(self.disk_peak, sum(one.nbytes for one in self._disks))

    def add(self, tensor: torch.Tensor) -> None:
        self._add(tensor, 0)

    def _add(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return

        def drop(_: object) -> None:
            del self._storages[key]
            self._made_bytes -= size

        self._storages[key] = weakref.ref(storage, drop)
        self._made_bytes += size
        self.peak = max(self.peak, self._made_bytes)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the states of a disk that are read, as HostBlock.take()."""
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        self.add(made)
        return made

    def among(self, leaves: Iterable[object]) -> bool:
        """Return whether one of these is such a tensor."""
        return bool(self._storages) and any(
            isinstance(leaf, torch.Tensor)
            and leaf.device.type == "cpu"
            and leaf.layout is torch.strided
            and leaf.untyped_storage()._cdata in self._storages
            for leaf in leaves
        )

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> Any:
        """Return what an operation of host tensors returns, with what it writes to as it was."""
        for tensor in written:
            self.add(tensor)
        returned = func._schema.returns
        if all(one.alias_info is not None for one in returned):
            return tuple(written) if len(returned) > 1 else written[0] if returned else None
        try:
            with record_function(ON_HOST):
                results = func(*map_leaves(_as_meta, args), **map_leaves(_as_meta, kwargs))
        except _NO_SUCH_SHAPE:
            return func(*args, **kwargs)
        return map_leaves(self._made, results)

    def _made(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
        self._add(made, made.untyped_storage().nbytes())
        return made


class _BlankDisk:
    """A disk for an optimizer's states (memopt._C.Disk) that keeps nothing, and a job of it."""

    def __init__(self, host: HostTensors) -> None:
        self._host, self.nbytes = host, 0

    def reserve(self, at: int, nbytes: int) -> None:
        self.nbytes = at + nbytes
        self._host.count_disks(self)

    def write(self, *_: object) -> _BlankDisk:
        return self

    read = write

    def finish(self) -> None:
        """Nothing is waited for."""


def _as_meta(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
