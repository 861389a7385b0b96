"""The C engine of checkpointed regions with torch's functions, and what a region asks of torch besides.

That is: the devices whose random and autocast state it depends on, its tensor arguments' and the CPU; and which
saved-tensor hooks are a user's, as selective checkpointing looks for those."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torchs
from torch._C import _autograd
from torch.utils._pytree import tree_leaves

from memopt import _C
from memopt._checkpoint.drop_in import mismatch_errors
from memopt._runtime.state_snapshot import generators


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


# ---- a region's devices ----------------------------------------------------------------------------------------------


class Devices(NamedTuple):
    """The devices of a region's arguments."""

    autocast: str | None  # the type of device whose autocast is kept beside the CPU's
    generators: tuple[Any, ...]
    uninitialized: Any  # the device's module, where it may be initialized while the region runs


_CPU_ALONE = Devices("cpu", (torch.default_generator,), None)


def devices_of(args: tuple[Any, ...]) -> Devices:
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


# ---- saved-tensor hooks ----------------------------------------------------------------------------------------------


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class InternalHook:
    """A region's pack hook, marked as torch marks its own. What is below it is looked up when it is asked for: held
    by the hook, and so by the graph, it might hold the graph."""

    __slots__ = ("pack",)
    _checkpoint_internal = True

    def __init__(self, pack: Callable[[Any], Any]) -> None:
        self.pack = pack

    def __call__(self, tensor: Any) -> Any:
        return self.pack(tensor)

    @property
    def _user_hooks(self) -> Hooks | None:
        return _first_of_users(below=self)


def user_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks that no checkpointed region has put there."""
    return _first_of_users(below=None)


def _is_internal(pack: Any) -> bool:
    return ENGINE.is_hook(pack) or getattr(pack, "_checkpoint_internal", False)


def _first_of_users(below: InternalHook | None) -> Hooks | None:
    """Return the innermost hooks of a user.

    Hooks are a stack of which only the top can be seen: they are taken off one by one and put back.
    """
    off: list[Hooks] = []
    passed = below is None
    try:
        while True:
            top: Hooks | None = _autograd._top_saved_tensors_default_hooks(False)
            if top is None:
                return None
            if passed and not _is_internal(top[0]):
                return top
            passed = passed or top[0] is below
            _autograd._pop_saved_tensors_default_hooks()
            off.append(top)
    finally:
        for hooks in reversed(off):
            _autograd._push_saved_tensors_default_hooks(*hooks)
