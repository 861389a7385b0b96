"""Pack hooks of checkpoint regions, told apart from users' own: selective checkpointing looks for the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import _autograd

from memopt._checkpoint.drop_in.engine import ENGINE

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


def users() -> Hooks | None:
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
