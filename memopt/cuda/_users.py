"""Users of a tensor's memory besides the tensor itself, looked for before memory is taken away under it.

Whoever can reach the memory through torch holds a reference to the storage (another tensor: a view, a detached one, a
saved result) or to the tensor (a saved input, the node that accumulates its gradient, a DLPack consumer, a C++ caller).
torch counts both. Counts that one tensor alone explains therefore prove that there is no other user, on any thread and
behind any hook. Names are looked for only when there is a user. Not counted, and so not seen: further Python names of
the same tensor object (a list, a closure that a checkpoint will run again, an attribute of an autograd Function's ctx)
and raw addresses (data_ptr(), __cuda_array_interface__).
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def users(tensor: torch.Tensor) -> list[str]:
    """Return descriptions of the other users of a tensor's memory, autograd's first; empty if there are none.

    A user that cannot be named is a line that says so.
    """
    tensors, of_this, wrappers = _references(tensor)
    alone = _alone()
    if (tensors, of_this) == alone[:2] and wrappers <= alone[2]:
        return []
    found = [*_graph_users(tensor), *_other_tensors(tensor)]
    if wrappers > alone[2]:
        found.append("a storage object (untyped_storage()) that the program keeps")
    if not found:
        found.append(
            f"something outside Python ({max(tensors - alone[0], of_this - alone[1])} references: autograd on another"
            " thread, a DLPack consumer or a C++ library)"
        )
    return found


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the reference counts of a tensor's storage, of the tensor, and of the storage's Python object."""
    import torch

    storage = tensor.untyped_storage()
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    return torch._C._storage_Use_Count(storage._cdata), of_tensor, sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int, int]:
    """Return the counts of _references() for a tensor without other users, in this Python and this torch."""
    import torch

    return _references(torch.empty(1, device="cpu"))


def _graph_users(tensor: torch.Tensor) -> list[str]:
    """Return nodes of live tensors' autograd graphs that keep the tensor, or another one on its memory."""
    storage = tensor.untyped_storage()._cdata
    found: dict[str, None] = {}
    for node, root in _nodes():
        for attribute, kept in _kept_by(node):
            if kept is tensor or _storage(kept) == storage:
                shape = tuple(root.shape)
                why = f"({attribute}) for the backward of a tensor of shape {shape}"
                found[f"{node.name()}, which keeps it {why}"] = None
    return list(found)


def _nodes() -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each autograd node once, with a tensor whose backward reaches it."""
    seen = set()
    for root in _live_tensors():
        stack = [root.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            yield node, root
            stack.extend(following for following, _ in node.next_functions)


def _kept_by(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in dir(node):
        if attribute.startswith("_saved_") or attribute in ("saved_tensors", "variable"):
            try:
                value = getattr(node, attribute)
            except (
                RuntimeError
            ):  # freed by a backward, or changed in place since: nothing is kept that could be read
                continue
            for one in value if isinstance(value, (tuple, list)) else (value,):
                yield attribute.removeprefix("_saved_"), one


def _other_tensors(tensor: torch.Tensor) -> list[str]:
    storage = tensor.untyped_storage()._cdata
    return [
        f"{'a view' if other._is_view() else 'another tensor'} of shape {tuple(other.shape)} on the same memory"
        for other in _live_tensors()
        if other is not tensor and _storage(other) == storage
    ]


def _live_tensors() -> list[torch.Tensor]:
    import torch

    # type(), not isinstance(): asking the class of a proxy may run its code.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _storage(value: Any) -> int | None:
    """Return the address of a tensor's storage; None for other objects and for tensors without a storage."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    try:
        storage: int = value.untyped_storage()._cdata
        return storage
    except (NotImplementedError, RuntimeError):
        return None
