"""torch's functions for memopt._C.CheckpointEngine, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch._C import _autograd

from memopt import _C
from memopt._checkpoint.drop_in import mismatch_errors


def _under_autocast(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    device: str | None,
    enabled: bool | None,
    dtype: torch.dtype | None,
    cpu_enabled: bool,
    cpu_dtype: torch.dtype,
    cache: bool,
) -> Any:
    """Call the function with autocast as it was; device None: with the CPU's alone."""
    with torch.amp.autocast("cpu", enabled=cpu_enabled, dtype=cpu_dtype, cache_enabled=cache):
        if device is None:
            return function(*args, **(kwargs or {}))
        with torch.amp.autocast(device, enabled=bool(enabled), dtype=dtype, cache_enabled=cache):
            return function(*args, **(kwargs or {}))


class _Keep(torch.autograd.Function):
    """An autograd function that saves a tensor, for a torch that has no call for it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return leaf.new_empty(0)


class _SavedInput:
    """A saved tensor with the interface of torch's SavedTensor."""

    def __init__(self, tensor: torch.Tensor, is_output: bool) -> None:
        self.keeper = _Keep.apply(torch.empty(0, requires_grad=True), tensor)

    def unpack(self) -> torch.Tensor:
        tensor: torch.Tensor
        (tensor,) = self.keeper.grad_fn.saved_tensors
        return tensor


def _make() -> _C.CheckpointEngine:
    saving = hasattr(_autograd, "_make_saved_tensor")
    return _C.CheckpointEngine(
        push_hooks=_autograd._push_saved_tensors_default_hooks,
        pop_hooks=_autograd._pop_saved_tensors_default_hooks,
        save_input=_autograd._make_saved_tensor if saving else _SavedInput,
        saved_input=_autograd.SavedTensor if saving else _SavedInput,
        graph_task=torch._C._current_graph_task_id,
        exec_group=getattr(torch._C, "_get_graph_exec_group", None),
        is_grad_enabled=torch.is_grad_enabled,
        set_grad_enabled=torch._C._set_grad_enabled,
        autocast_enabled=torch.is_autocast_enabled,
        autocast_dtype=torch.get_autocast_dtype,
        autocast_cache=torch.is_autocast_cache_enabled,
        under_autocast=_under_autocast,
        describe=mismatch_errors.describe,
        equal=mismatch_errors.equal,
        note=mismatch_errors.note,
        complain=mismatch_errors.complain,
        stop=torchs._StopRecomputationError,
        error=torchs.CheckpointError,
    )


ENGINE = _make()
