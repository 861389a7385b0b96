"""Host shadows: values of tensors on a device that keeps none. A shadow is what a storage would hold, kept on the host.

Integers, booleans and a few floats (labels, masks, lengths, counters, scales) have one as long as every operation that
made them had its inputs' shadows: they decide what a script does. Weights and activations have none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

MOST_INTEGERS = 1 << 22  # elements that a shadow may have
MOST_FLOATS = 1 << 10
MOST_DRAWN = 1 << 16  # floats, of random numbers: masks are made by comparing them
MOST_BYTES = 256 << 20  # of all shadows together


@dataclass
class _HostShadow:
    """The shadow of a storage. `values`: its bytes; or, if all elements are equal, one element as a tensor."""

    values: torch.UntypedStorage | torch.Tensor
    drawn: bool = False  # random numbers, of another generator than the device's
    may_be_gradient: bool = False


class HostShadows:
    def __init__(self) -> None:
        self._shadows: dict[int, _HostShadow] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU tensor over the values, None if they are not known.

        Values written to it are known afterwards. A tensor whose elements are all equal is expanded, and cannot be
        written to.
        """
        shadow = self._shadow(tensor)
        if shadow is None:
            return None
        if isinstance(shadow.values, torch.Tensor):
            return shadow.values.expand(tensor.size()) if shadow.values.dtype == tensor.dtype else None
        if shadow.values.nbytes() != tensor.untyped_storage().nbytes():
            return None  # resized since
        return _over(shadow.values, tensor)

    def the_one(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the element, as a tensor of no dimensions, if all are known to be equal; else None."""
        shadow = self._shadow(tensor)
        values = None if shadow is None else shadow.values
        return values if isinstance(values, torch.Tensor) and values.dtype == tensor.dtype else None

    def drawn(self, tensor: torch.Tensor) -> bool:
        shadow = self._shadow(tensor)
        return shadow is not None and shadow.drawn

    def put(self, tensor: torch.Tensor, values: torch.Tensor, *, made: bool, drawn: bool = False) -> None:
        """Set the tensor's known values. `made`: the tensor was created just now.

        Unknown parts of a storage stay unknown, and so do values beyond the size that may be kept.
        """
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        shadow = self._shadow(tensor)
        if shadow is not None and not (
            isinstance(shadow.values, torch.UntypedStorage) and shadow.values.nbytes() == size
        ):
            self._drop(storage._cdata)
            shadow = None
        if shadow is None:
            whole = tensor.numel() * tensor.element_size() == size
            if not whole or tensor.numel() > most_elements(tensor.dtype, drawn):
                return
            if self._bytes + size > MOST_BYTES:
                return
            # Gradients are made in backward passes, where nobody looks on, so the tensor was there before.
            may_be_gradient = tensor.is_floating_point() and (tensor.numel() > 1 or not made)
            made_now = torch.zeros(size, dtype=torch.uint8).untyped_storage()
            shadow = _HostShadow(made_now, may_be_gradient=may_be_gradient)
            self._add(storage, shadow, size)
        shadow.drawn = shadow.drawn or drawn
        assert isinstance(shadow.values, torch.UntypedStorage)
        _over(shadow.values, tensor).copy_(values)

    def put_one(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set all elements of the tensor, which fills its storage, to this one."""
        if not has_storage(tensor):
            return
        self.forget(tensor)
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self._add(tensor.untyped_storage(), _HostShadow(value.reshape(()).to("cpu", tensor.dtype)), 0)

    def forget(self, tensor: torch.Tensor) -> None:
        if has_storage(tensor):
            self._drop(tensor.untyped_storage()._cdata)

    def forget_gradients(self) -> None:
        """Forget what may be a gradient: a backward pass adds to gradients while the mode is off."""
        for key in [key for key, shadow in self._shadows.items() if shadow.may_be_gradient]:
            self._drop(key)

    # ---- the table ----------------------------------------------------------------------------------------------

    def _shadow(self, tensor: torch.Tensor) -> _HostShadow | None:
        return self._shadows.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def _add(self, storage: torch.UntypedStorage, shadow: _HostShadow, size: int) -> None:
        key = storage._cdata
        self._shadows[key] = shadow
        self._bytes += size
        # A storage's address is another's once it is gone.
        self._watches[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        self._watches.pop(key, None)
        shadow = self._shadows.pop(key, None)
        if shadow is not None and isinstance(shadow.values, torch.UntypedStorage):
            self._bytes -= shadow.values.nbytes()


def most_elements(dtype: torch.dtype, drawn: bool = False) -> int:
    if dtype.is_floating_point or dtype.is_complex:
        return MOST_DRAWN if drawn else MOST_FLOATS
    return MOST_INTEGERS


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _over(values: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]
