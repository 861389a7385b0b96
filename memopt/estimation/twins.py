"""Values of tensors on a device that keeps none: a *twin* is what a storage would hold, kept on the host.

Integers, truth values and a few floats (labels, masks, lengths, counters, scales) have one as long as each operation on
the way had: they decide what a script does. Weights and activations have none."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

MOST_INTEGERS = 1 << 22  # elements that a twin may have
MOST_FLOATS = 1 << 10
MOST_DRAWN = 1 << 16  # floats, of random numbers: masks are made by comparing them
MOST_BYTES = 256 << 20  # of all twins together


@dataclass
class _Twin:
    """`values`: the storage's bytes; or, where each element is the same one, that element as a tensor of one."""

    values: torch.UntypedStorage | torch.Tensor
    drawn: bool = False  # random numbers, of another generator than the device's
    may_be_gradient: bool = False


class Twins:
    def __init__(self) -> None:
        self._twins: dict[int, _Twin] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor on the CPU over the values, None where they are not known. What is written to it is known then;
        one whose elements are all the same is expanded, and cannot be written to."""
        twin = self._twin(tensor)
        if twin is None:
            return None
        if isinstance(twin.values, torch.Tensor):
            return twin.values.expand(tensor.size()) if twin.values.dtype == tensor.dtype else None
        if twin.values.nbytes() != tensor.untyped_storage().nbytes():
            return None  # resized since
        return _over(twin.values, tensor)

    def the_one(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The element, as a tensor of no dimensions, where all are known to be the same; else None."""
        twin = self._twin(tensor)
        values = None if twin is None else twin.values
        return values if isinstance(values, torch.Tensor) and values.dtype == tensor.dtype else None

    def drawn(self, tensor: torch.Tensor) -> bool:
        twin = self._twin(tensor)
        return twin is not None and twin.drawn

    def put(self, tensor: torch.Tensor, values: torch.Tensor, *, made: bool, drawn: bool = False) -> None:
        """What the tensor holds from now on; `made`: it came to be just now. A part of a storage that is not known
        stays unknown, and so does what would be more than may be kept."""
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        twin = self._twin(tensor)
        if twin is not None and not (
            isinstance(twin.values, torch.UntypedStorage) and twin.values.nbytes() == size
        ):
            self._drop(storage._cdata)
            twin = None
        if twin is None:
            whole = tensor.numel() * tensor.element_size() == size
            if not whole or tensor.numel() > most_elements(tensor.dtype, drawn):
                return
            if self._bytes + size > MOST_BYTES:
                return
            # Gradients are made in backward passes, where nobody looks on, so the tensor was there before.
            may_be_gradient = tensor.is_floating_point() and (tensor.numel() > 1 or not made)
            made_now = torch.zeros(size, dtype=torch.uint8).untyped_storage()
            twin = _Twin(made_now, may_be_gradient=may_be_gradient)
            self._add(storage, twin, size)
        twin.drawn = twin.drawn or drawn
        assert isinstance(twin.values, torch.UntypedStorage)
        _over(twin.values, tensor).copy_(values)

    def put_one(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Each element of the tensor, which fills its storage, is this one from now on."""
        if not has_storage(tensor):
            return
        self.forget(tensor)
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self._add(tensor.untyped_storage(), _Twin(value.reshape(()).to("cpu", tensor.dtype)), 0)

    def forget(self, tensor: torch.Tensor) -> None:
        if has_storage(tensor):
            self._drop(tensor.untyped_storage()._cdata)

    def forget_gradients(self) -> None:
        """A backward pass adds to gradients where nobody looks on: what may be one is unknown after it."""
        for key in [key for key, twin in self._twins.items() if twin.may_be_gradient]:
            self._drop(key)

    # ---- the table ----------------------------------------------------------------------------------------------

    def _twin(self, tensor: torch.Tensor) -> _Twin | None:
        return self._twins.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def _add(self, storage: torch.UntypedStorage, twin: _Twin, size: int) -> None:
        key = storage._cdata
        self._twins[key] = twin
        self._bytes += size
        # A storage's address is another's once it is gone.
        self._watches[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        self._watches.pop(key, None)
        twin = self._twins.pop(key, None)
        if twin is not None and isinstance(twin.values, torch.UntypedStorage):
            self._bytes -= twin.values.nbytes()


def most_elements(dtype: torch.dtype, drawn: bool = False) -> int:
    if dtype.is_floating_point or dtype.is_complex:
        return MOST_DRAWN if drawn else MOST_FLOATS
    return MOST_INTEGERS


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _over(values: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]
