"""Something that is to be done when the program imports torch, just before or right after it, and not earlier: what the
program sets in the environment ahead of that keeps its meaning."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_before_torch(then: Callable[[], None]) -> None:
    """Call a function before torch is imported; its exception is raised by `import torch`, which then loads nothing."""
    sys.meta_path.insert(0, _Finder(before=then))


def call_after_torch(then: Callable[[], None]) -> None:
    """At once where torch is imported already."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(after=then))


def _nothing() -> None:
    pass


class _Finder(MetaPathFinder):
    """Stays until torch is there: to be asked where it is does not mean that it is imported."""

    def __init__(self, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing) -> None:
        self.before, self._after = before, after
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def torch_is_there(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._after()


class _Loader(Loader):
    """The loader of the module, which is in its place again once the module is loaded."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._finder.before()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.torch_is_there()
