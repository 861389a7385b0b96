"""Selective activation checkpointing: each operation of a region is kept, recomputed, or kept on the host.

One dispatch mode sees the first run of a region, another its second. An operation is identified by its overload and by
how many calls of that overload came before it in the region.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from memopt import _C
from memopt._checkpoint.drop_in.checkpoint import is_tracing
from memopt._checkpoint.drop_in.engine import user_hooks
from memopt._offload.pinned_memory import dense_bytes, host_memory
from memopt._offload.transfers import PinnedTransfer
from memopt._runtime.originals import original

torchs_contexts = original(torchs, "create_selective_checkpoint_contexts")

Policy = Callable[..., Any]

_MISMATCH = (
    "This can happen if the operations in the checkpointed region are "
    "nondeterministic or depend on global state that changed between "
    "forward and backward."
)
_WARNS_OF_HOOKS = hasattr(torchs, "_current_user_saved_tensors_hooks")
_HOOKS_IN_SCOPE = (
    "A saved_tensors_hooks context (e.g. save_on_cpu) is "
    "active around a selective activation checkpoint region. "
    "Tensors that SAC saves currently bypass these hooks, but "
    "a future release will route them through the hooks like "
    "any other saved tensor. Silence this warning and choose "
    "the behavior explicitly by passing "
    "respect_saved_tensors_hooks=True|False to "
    "torch.utils.checkpoint.checkpoint."
)

_RECOMPUTE = object()  # an operation that runs again
_CONSUMED = object()  # what was kept has been given back


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return two contexts that decide for each operation of a checkpoint whether its result is kept or recomputed.

    A drop-in for torch.utils.checkpoint.create_selective_checkpoint_contexts, for `context_fn` of a checkpoint that is
    not reentrant. CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD copy a result to pinned host memory, on a
    separate stream, and free it on the device. Results on the CPU, tensor subclasses, and results computed while a CUDA
    graph is captured are kept as they are.

    Args:
        policy_fn_or_list: policy_fn(ctx, op, *args, **kwargs), which returns a CheckpointPolicy or a bool (keep); or a
            list of the operations to keep.
        allow_cache_entry_mutation: Whether kept results may have been changed in place, which is an error otherwise.

    Returns:
        The contexts of the first run and of the second.

    Raises:
        TypeError: The argument is neither a function nor a list of operations.

    Examples:
        >>> contexts = functools.partial(memopt.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        >>> y = memopt.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    """
    if torch.compiler.is_compiling() or is_tracing():
        contexts: tuple[TorchDispatchMode, TorchDispatchMode] = torchs_contexts(
            policy_fn_or_list, allow_cache_entry_mutation
        )
        return contexts
    if isinstance(policy_fn_or_list, list):
        policy = _policy_of(policy_fn_or_list)
    elif callable(policy_fn_or_list):
        policy = policy_fn_or_list
    else:
        raise TypeError("policy_fn_or_list must be either a function or a list of ops.")
    storage: Storage = defaultdict(dict)
    return KeepingMode(policy, storage), GivingBackMode(storage, allow_cache_entry_mutation)


def _policy_of(operations: list[Any]) -> Policy:
    for op in operations:
        if not isinstance(op, OpOverload | HigherOrderOperator):
            extra = (
                (
                    "Please update the OpOverloadPacket to a specific OpOverload."
                    "For example, if you have `torch.ops.aten.mm`, change it to `torch.ops.aten.mm.default`."
                )
                if isinstance(op, OpOverloadPacket)
                else ""
            )
            raise ValueError(
                f"Expected op in `op_list` to be an OpOverload but got: {op} of type {type(op)}. {extra}"
            )

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torchs.CheckpointPolicy:
        kept = op in operations
        return torchs.CheckpointPolicy.MUST_SAVE if kept else torchs.CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# ---- what is kept ----------------------------------------------------------------------------------------------------


class HostCopy:
    """A tensor of a CUDA device in pinned memory.

    The tensor may go at any time: its memory is free once the copy is made.

    Raises:
        MemoryError: The host cannot lock so much.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = dense_bytes(tensor)
        if flat is None:
            tensor = torch.empty_like(tensor).copy_(tensor)
            flat = dense_bytes(tensor)
            assert flat is not None
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        device = tensor.device
        room = host_memory(device).take(tensor.nbytes)
        if room is None:
            raise MemoryError(
                f"the host cannot lock {tensor.nbytes} bytes for a tensor that a checkpoint policy offloads: raise "
                "`ulimit -l` or the memory limit of the container, or save or recompute the tensor"
            )
        self.transfer = PinnedTransfer(flat, room, torch.cuda.current_stream(device).cuda_stream)
        tensor.record_stream(_copies_out(device))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostCopy | None:
        """Return a copy on the host; None for a result that is not on a CUDA device, or not plain memory."""
        if type(tensor) is not torch.Tensor or not tensor.is_cuda or tensor.layout is not torch.strided:
            return None
        return cls(tensor) if tensor.nbytes and not torch.cuda.is_current_stream_capturing() else None

    def back(self) -> torch.Tensor:
        return self.transfer.back().view(self.dtype).as_strided(self.size, self.stride)


@functools.cache
def _copies_out(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(_C.copy_counts(device.index)["stream_out"], device)


class _KeptResult:
    """A part of a result: a tensor, what hooks of the user's made of it, or a copy on the host."""

    __slots__ = ("unpack", "val", "version")

    def __init__(self, val: Any, unpack: Callable[[Any], Any] | None = None) -> None:
        self.val, self.unpack = val, unpack
        self.version = val._version if isinstance(val, torch.Tensor) else None

    def back(self, allow_mutation: bool) -> Any:
        if self.version is not None and not allow_mutation and self.val._version != self.version:
            raise RuntimeError("Tensor cached during selective activation checkpoint has been mutated")
        if isinstance(self.val, HostCopy):
            return self.val.back()
        return self.val if self.unpack is None else self.unpack(self.val)


Storage = defaultdict[Any, dict[int, Any]]


def _key(op: Any, args: Any) -> Any:
    if isinstance(op, HigherOrderOperator) and hasattr(torchs, "_sac_storage_key"):
        return torchs._sac_storage_key(op, args)
    return op


def _without_graph(x: Any) -> Any:
    """Return the tensor detached below autograd, with its version counter shared."""
    if isinstance(x, torch.Tensor):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return x.detach()
    return x


class KeepingMode(torchs._CachingTorchDispatchMode):  # type: ignore[misc]
    """Mode of the first run. A subclass of torch's mode, with its attributes, for code that checks the type."""

    respect_saved_tensors_hooks: bool | None = None  # set by memopt.checkpoint

    def __init__(self, policy: Policy, storage: Storage) -> None:
        super().__init__(policy, storage)
        self.counts: dict[Any, int] = defaultdict(int)
        self.leaving: list[HostCopy] = []

    def __exit__(self, *raised: Any) -> None:
        self._settle()
        super().__exit__(*raised)

    def _settle(self) -> None:
        """Let work queued from here on overwrite the memory of kept results."""
        for copy in self.leaving:
            copy.transfer.settle()
        self.leaving.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in torchs.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if self.leaving and isinstance(func, OpOverload) and func._schema.is_mutable:
            self._settle()
        out = func(*args, **kwargs)
        key = _key(func, args)
        index = self.counts[key]
        self.counts[key] += 1
        context = torchs.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = out
        policy = self._decided(self.policy_fn(context, func, *args, **kwargs), func)
        self.storage[key][index] = _RECOMPUTE if policy == "recompute" else self._keep(out, policy)
        return out

    def _decided(self, answer: Any, func: Any) -> str:
        """Return 'save', 'offload' or 'recompute'."""
        if isinstance(answer, bool):
            return "save" if answer else "recompute"
        name: str = answer.name
        if name.endswith("_SAVE"):
            return "save"
        if name.endswith("_CPU_OFFLOAD"):
            return "offload"
        cacheable = getattr(torchs, "_is_cacheable_effect", None)
        if name != "MUST_RECOMPUTE" and cacheable is not None and cacheable(func):
            return "save"  # an ordered effect cannot be repeated
        return "recompute"

    def _keep(self, out: Any, policy: str) -> Any:
        hooks = user_hooks()
        if hooks is not None:
            if self.respect_saved_tensors_hooks is None and _WARNS_OF_HOOKS:
                warnings.warn(_HOOKS_IN_SCOPE, FutureWarning, stacklevel=3)
            if not self.respect_saved_tensors_hooks:
                hooks = None

        def keep(x: Any) -> _KeptResult:
            x = _without_graph(x)
            if policy == "offload" and isinstance(x, torch.Tensor):
                host = HostCopy.of(x)
                if host is not None:
                    self.leaving.append(host)
                    return _KeptResult(host)
            if hooks is not None and isinstance(x, torch.Tensor):
                return _KeptResult(hooks[0](x), hooks[1])
            return _KeptResult(x)

        return tree_map(keep, out)


class GivingBackMode(torchs._CachedTorchDispatchMode):  # type: ignore[misc]
    """Mode of the second run, which returns kept results."""

    def __init__(self, storage: Storage, allow_cache_entry_mutation: bool) -> None:
        super().__init__(None, storage, allow_cache_entry_mutation)
        self.counts: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self.counts.clear()  # of an earlier second run
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in torchs.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        key = _key(func, args)
        index = self.counts[key]
        self.counts[key] += 1
        entries = self.storage.get(key)
        if entries is None:
            raise RuntimeError(f"{func} encountered during backward but not found in storage. {_MISMATCH}")
        entry = entries.get(index)
        if entry is None:
            raise RuntimeError(
                f"{func} invocation index {index} encountered during backward but not found in storage. "
                f"{_MISMATCH}"
            )
        if entry is _CONSUMED:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once "
                "on any region computed under selective activation checkpoint."
            )
        if entry is _RECOMPUTE:
            return func(*args, **kwargs)
        entries[index] = _CONSUMED
        return tree_map(lambda one: one.back(self.allow_cache_entry_mutation), entry)
