"""References to offloaded parameters, which autograd saves in the place of the device's copies of them.

A pack hook sees all that is saved while a layer runs. A tensor in the storage of such a copy, or cast from one by
autocast, becomes a `Reference`; the backward pass, asking for it, gets the parameter from where it is kept then. It
asks whichever way it takes through the graph, so that what it reads is always there. All else goes to the hooks that
were there before (a checkpointed region's, offloaded activations'), or is kept as torch keeps it, with the same check
that it has not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _autograd

if TYPE_CHECKING:
    from memopt._offload.layer_residency import LayerResidency

CAST = "ToCopyBackward0"


class Reference:
    """A saved view of a parameter's copy. run: of the layer it belongs to; version: the parameter's."""

    __slots__ = ("__weakref__", "dtype", "offset", "parameter", "run", "size", "stride", "version")

    def __init__(
        self, run: Any, parameter: torch.Tensor, view: torch.Tensor, dtype: torch.dtype | None
    ) -> None:
        self.run, self.parameter, self.version = run, parameter, parameter._version
        self.dtype = dtype
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()

    def of(self, copy: torch.Tensor) -> torch.Tensor:
        """Return the view, on the copy that exists now."""
        check(self.parameter, self.version, "a parameter offloaded by offload_layers()")
        if self.dtype is not None:
            copy = copy.to(self.dtype)
        return copy.as_strided(self.size, self.stride, self.offset)


class SavedAsIs:
    """A tensor that is saved as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


class SavedByOthers:
    """A saved tensor as other hooks have packed it."""

    __slots__ = ("unpack", "value")

    def __init__(self, value: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.value, self.unpack = value, unpack


def check(tensor: torch.Tensor, version: int, what: str) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}], {what}, is at version {tensor._version}; expected version "
            f"{version} instead"
        )


class SavedParameters:
    """The hooks, while a layer runs."""

    _checkpoint_internal = True  # to torch's regions, and memopt's: not a user's

    def __init__(self, source: LayerResidency) -> None:
        self.source = source
        self.before: Any = None

    def __enter__(self) -> SavedParameters:
        self.before = _autograd._top_saved_tensors_default_hooks(False)
        pack = _Pack(self.source, self.before)
        _autograd._push_saved_tensors_default_hooks(pack, _unpack_by(self.source))
        return self

    def __exit__(self, *raised: object) -> None:
        _autograd._pop_saved_tensors_default_hooks()


class _Pack:
    __slots__ = ("before", "source")
    _checkpoint_internal = True

    def __init__(self, source: LayerResidency, before: Any) -> None:
        self.source, self.before = source, before

    def __call__(self, tensor: torch.Tensor) -> Any:
        found = parameter_behind(self.source, tensor)
        if found is not None:
            parameter, dtype = found
            return Reference(self.source.refer(parameter), parameter, tensor, dtype)
        if self.before is not None:
            pack, unpack = self.before
            return SavedByOthers(pack(tensor), unpack)
        return SavedAsIs(tensor)


def parameter_behind(
    source: LayerResidency, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.dtype | None] | None:
    """Return the parameter whose copy contains the tensor or, with its dtype, from which the tensor was cast."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    parameter = source.parameter_of(tensor.untyped_storage()._cdata)
    if parameter is not None:
        return (parameter, None) if tensor.dtype == parameter.dtype else None
    base = tensor._base if tensor._is_view() else tensor
    node = None if base is None else base.grad_fn
    if base is None or node is None or base._version or node.name() != CAST or base.device != source.device:
        return None  # also where it was brought to another device: the cast is of the copy on this one
    parameter = getattr(node.next_functions[0][0], "host_parameter", None)
    if parameter is None or base.shape != parameter.shape or base.storage_offset():
        return None
    # The cast is made again from the parameter's own order.
    return (parameter, base.dtype) if base.stride() == _strides(parameter) else None


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()  # type: ignore[no-any-return]


def _unpack_by(source: LayerResidency) -> Callable[[Any], torch.Tensor]:
    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, Reference):
            return saved.of(source.back(saved))
        if isinstance(saved, SavedByOthers):
            return saved.unpack(saved.value)
        check(saved.tensor, saved.version, "kept for the backward pass")
        return saved.tensor  # type: ignore[no-any-return]

    return unpack
