"""Tensors on the CPU over the memory of tensors on the simulated device, which is host memory at the same addresses."""

from __future__ import annotations

import ctypes
from typing import TypeGuard

import torch

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def on_cuda(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda and not dispatches(type(leaf))


def dispatches(kind: type) -> bool:
    """Whether tensors of this type handle their operations themselves, as fake tensors and wrapper subclasses do."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def is_plain(leaf: object) -> bool:
    """Whether a tensor's memory is one storage that its shape and strides describe."""
    return not isinstance(leaf, torch.Tensor) or (leaf.layout is torch.strided and not leaf.is_nested)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over a cuda tensor's memory."""
    if tensor.is_nested:
        parts = (
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
        return torch._nested_view_from_buffer(alias(tensor.values()), *parts)
    if tensor.layout is torch.sparse_coo:
        indices, values = alias(tensor._indices()), alias(tensor._values())
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, tensor.shape, is_coalesced=coalesced, check_invariants=False
        )
    if tensor.layout in _COMPRESSED:
        outer, inner = (alias(getattr(tensor, name)()) for name in _COMPRESSED[tensor.layout])
        return torch.sparse_compressed_tensor(
            outer, inner, alias(tensor.values()), tensor.shape, layout=tensor.layout, check_invariants=False
        )
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class HostGenerators:
    """CPU generators that stand for the device's and give the numbers of a CPU generator of the same seed.

    A device generator has no identity but its position: seed and offset, which also tell whether it was set back.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, generator: torch.Generator) -> torch.Generator:
        """Return a CPU generator in the state that the device's generator has now."""
        if generator.device.type != "cuda" or generator in torch.cuda.default_generators:
            return torch.default_generator  # which is seeded together with it
        on_host = torch.Generator().manual_seed(generator.initial_seed())
        state = self._states.get(_position(generator))
        return on_host if state is None else on_host.set_state(state)

    def drawn(self, generator: torch.Generator, on_host: torch.Generator) -> None:
        """Note that both generators have advanced."""
        if on_host is not torch.default_generator:
            self._states.pop(_position(generator), None)
            self._states[_position(generator)] = on_host.get_state()
            while len(self._states) > _MOST_POSITIONS:
                del self._states[next(iter(self._states))]


_MOST_POSITIONS = 256


def _position(generator: torch.Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()
