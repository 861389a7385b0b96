"""The user's program in this process: run as `python script.py` or `python -m module` runs it, and watched for its
import of torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any


def run_as_main(argv: list[str], module: bool) -> None:
    """Run the program as __main__.

    argv[0]: the script, or the module's name. Its exceptions are passed on, SystemExit too. Its __main__ module
    remains, because functions that run at exit, and pickles, need it."""
    sys.argv = list(argv)
    if module:
        sys.path[0] = os.getcwd()
        run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` itself calls
        run(argv[0], alter_argv=True)
        return
    path = os.path.abspath(argv[0])
    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and _is_archive(path)):
        runpy.run_path(path, run_name="__main__")  # it has a __main__
        return
    sys.path[0] = os.path.dirname(path)
    main: Any = types.ModuleType("__main__")
    main.__file__, main.__loader__ = path, importlib.machinery.SourceFileLoader("__main__", path)
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    exec(main.__loader__.source_to_code(Path(path).read_bytes(), path), main.__dict__)


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK" or path.endswith(".pyc")


# ---- its import of torch ---------------------------------------------------------------------------------------------


def call_before_torch(then: Callable[[], None]) -> None:
    """Call a function before torch is imported; its exception is raised by `import torch`, which then loads nothing."""
    sys.meta_path.insert(0, _Finder(before=then))


def call_after_torch(then: Callable[[], None]) -> None:
    """Call a function after torch is imported; at once if it is imported already."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(after=then))


def _nothing() -> None:
    pass


class _Finder(MetaPathFinder):
    """A finder that remains until torch is imported: a lookup of torch does not mean that it is imported."""

    def __init__(self, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing) -> None:
        self.before, self._after = before, after
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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
    """The loader of a module, which is replaced by the original once the module is loaded."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        self._finder.before()
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.torch_is_there()
