"""Real numbers on the simulated device.

Each ATen op first runs on cuda, so that it allocates, launches and frees as it does on a GPU (its kernels do nothing);
then the same op runs on CPU tensors that alias the same memory, and its values are kept. A loss under Compute is the
CPU's, bit for bit, while the memory behaviour is PyTorch's own CUDA allocator's.

    with memopt.sim.Compute():
        train()

What cuDNN and the fused attention compute is in host_kernels.py. What it cannot do: another op without a CPU twin, a
kernel launched outside ATen (give it a host body with memopt.sim.emulate), and work that a CUDA graph replays. It waits
for the device after every op.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memopt.sim.activation import is_active
from memopt.sim.host_kernels import HOST_KERNELS

_aten = torch.ops.aten

# The shape of the result depends on values: the CPU decides, and its answer is moved over.
SHAPE_FROM_VALUES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.bincount.default,
    _aten.index.Tensor,
    _aten.repeat_interleave.Tensor,
}
# They read, move or point to what is there, or ask the device or the tensor itself, and compute nothing.
_AS_THEY_ARE = {
    _aten._local_scalar_dense.default,
    _aten._fused_sdp_choice.default,
    _aten._use_cudnn_ctc_loss.default,
    _aten._use_cudnn_ctc_loss.Tensor,
    _aten.is_set_to.default,  # two aliases of one storage are storages of their own
    _aten.record_stream.default,
    _aten.is_pinned.default,
    _aten._pin_memory.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten._cudnn_rnn_flatten_weight.default,  # its copies are real
    _aten._cudnn_init_dropout_state.default,  # read by cuDNN alone
}


class Compute(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """A dispatch mode under which simulated CUDA ops give the values of their CPU twins."""

    def __init__(self) -> None:
        if not is_active():
            raise RuntimeError(
                "Compute is for the simulated device: call memopt.sim.activate() before importing torch"
            )
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _on_cuda(leaf)]
        if func in _AS_THEY_ARE or func.is_view:
            return func(*args, **kwargs)
        if func in SHAPE_FROM_VALUES and inputs:
            torch.cuda.synchronize()
            values = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
            return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, values)
        return self.computed(func, args, kwargs)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result on cuda, with the values that the CPU computes; their shapes are the same. What is no tensor
        (torch.equal's answer) is the CPU's."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _on_cuda(leaf)]
        result = func(*args, **kwargs)
        if not inputs and not any(map(_on_cuda, tree_leaves(result))):
            return result
        torch.cuda.synchronize()  # copies are real work: the CPU must not overtake them
        kernel = HOST_KERNELS.get(func)
        values = (kernel or func)(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if kernel is not None:
            _keep(result, values)
            return result
        written = {
            tensor.untyped_storage().data_ptr() for tensor in inputs
        }  # in place and out=: done by aliasing
        results, spec = tree_flatten(result)
        for n, (tensor, value) in enumerate(zip(results, tree_leaves(values), strict=True)):
            if not isinstance(tensor, torch.Tensor):
                results[n] = value
                continue
            if not _on_cuda(tensor) or not tensor.numel() or tensor.untyped_storage().data_ptr() in written:
                continue
            if tensor.shape != value.shape:
                raise RuntimeError(f"{func}: {tuple(tensor.shape)} on cuda, {tuple(value.shape)} on the CPU")
            alias(tensor).copy_(value)
        return tree_unflatten(results, spec)


def _keep(result: Any, values: Any) -> None:
    """A host kernel's values; fewer than the results, and None, leave what is there."""
    for tensor, value in zip(tree_leaves(result), tree_leaves(values), strict=False):
        if _on_cuda(tensor) and isinstance(value, torch.Tensor) and tensor.numel():
            alias(tensor).copy_(value)


def _on_cuda(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over a cuda tensor's memory, which is host memory at the same address."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_cpu(leaf: object) -> object:
    if _on_cuda(leaf):
        return alias(leaf)
    if isinstance(leaf, torch.Generator):
        return torch.default_generator
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
