"""Values of the names in a function, and the modules that are the program's own.

Names are followed through the program's own modules as far as the source says. Functions that find modules and globals
by name (import_module, sys.modules, globals) are refused."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import linecache
import pkgutil
import runpy
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memopt.data._cache.function_source import IMPORT, Chain

if TYPE_CHECKING:
    from memopt.data._cache.cache_key import KeyDigest

_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_own(module_name: str | None) -> bool:
    """Whether a module is the program's: not built in, of the standard library or of an installed package."""
    module = sys.modules.get(module_name or "")
    if (module_name or "").partition(".")[0] == "memopt":
        return False  # wherever it lies: its version counts
    if module is None:
        return True  # made at run time: no package has it
    path = getattr(module, "__file__", None)
    if path is None:
        return module_name in ("__main__", "__mp_main__") or not _built_in(module)
    return not (path.startswith(_INSTALLED) or "/site-packages/" in path or "/dist-packages/" in path)


def is_own_module(value: object) -> bool:
    return isinstance(value, types.ModuleType) and is_own(value.__name__)


def _built_in(module: types.ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", "built-in") in ("built-in", "frozen")


def version_named(module_name: str) -> str:
    """A module's name, and the version of the package that it belongs to."""
    package, *within = module_name.split(".")
    version = getattr(sys.modules.get(package), "__version__", None)
    if package.lstrip("_") in sys.stdlib_module_names:  # private modules differ between versions of Python
        module_name = ".".join([package.lstrip("_"), *(name for name in within if name[0] != "_")])
    return f"{name_of_main(module_name)} {version if isinstance(version, str) else _distribution_version(package)}"


@functools.cache
def _distribution_version(package: str) -> str:
    if package not in sys.stdlib_module_names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            return importlib.metadata.version(package)
    return ""


def name_of_main(module_name: str | None) -> str:
    return "__main__" if module_name == "__mp_main__" else str(module_name)  # a spawned worker's __main__


_FINDERS = (
    sys.modules, builtins.__import__, importlib.__import__, importlib.import_module, importlib.reload,
    importlib.util.module_from_spec, pkgutil.resolve_name, runpy.run_module, runpy.run_path, builtins.globals,
    builtins.eval, builtins.exec,
)  # fmt: skip
"""Functions and data by which code finds modules and globals by name."""
FINDER_ATTRIBUTES = {"modules", "__import__", "import_module", "reload", "module_from_spec", "resolve_name"}
FINDER_ATTRIBUTES |= {"run_module", "run_path"}
_FINDS = "its names are not known before it runs: import by a statement, or pass what is found as an argument"


def read(
    digest: KeyDigest, function: types.FunctionType, chain: Chain, path: str
) -> Iterator[tuple[str, Any]]:
    """The value that a dotted name leads to, as far as it leads through the program's own modules, with the part that
    was followed; or nothing."""
    if _ignored(digest, chain):
        return
    value = _first(function, chain[0])
    if value is None:
        return
    for taken, step in enumerate([*chain[1:], ""], 1):
        finder = _finder_in(value, chain[taken:])
        if finder is not None:
            if not digest.versioned:
                raise digest.refused(f"{'.'.join(chain)!r}, which {path} uses,", finder, _FINDS)
            return
        private = step.startswith("__") and not step.endswith("__")  # within a class it has another name
        if not step or private or not is_own_module(value):
            yield ".".join(chain[:taken]), value
            return
        if not _has(value, step):
            return  # the call itself will say so
        value = getattr(value, step)


def _first(function: types.FunctionType, name: str) -> Any:
    """The value of a chain's first name: None if it is none or counts elsewhere."""
    if name.startswith(IMPORT):
        return _imported(function, name.removeprefix(IMPORT))
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        with contextlib.suppress(ValueError):  # not bound yet
            if is_own_module(cell.cell_contents) or _is_finder(cell.cell_contents):
                return cell.cell_contents
        return None  # counts with what the function closes over
    if name in function.__globals__:
        return function.__globals__[name]
    built_in = vars(builtins).get(name)
    return built_in if _is_finder(built_in) else None


def _has(module: Any, name: str) -> bool:
    """Whether a module has an attribute, or a submodule that nobody has imported yet."""
    if not hasattr(module, name) and hasattr(module, "__path__") and name.isidentifier():
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{module.__name__}.{name}")
    return hasattr(module, name)


def _imported(function: types.FunctionType, name: str) -> types.ModuleType | None:
    """A module that a function imports: imported now, as its code is not known without. None if it is not there: the
    function does without, or says so itself."""
    package = function.__globals__.get("__package__")
    with contextlib.suppress(ImportError, ValueError):
        return importlib.import_module(importlib.util.resolve_name(name, package))
    return None


def _is_finder(value: object) -> bool:
    return any(value is finder for finder in _FINDERS)


def _finder_in(value: Any, steps: Chain) -> Any:
    """The finder that a value is or, through modules, leads to; or None."""
    for step in (*steps, ""):
        if _is_finder(value):
            return value
        value = getattr(value, step, None) if isinstance(value, types.ModuleType) else None
    return None


def _ignored(digest: KeyDigest, chain: Chain) -> bool:
    """By its name, by that of anything it is read of, or, of `from a import b`, as b."""
    parts = (chain[0].removeprefix(IMPORT), *chain[1:])
    names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not digest.ignore.isdisjoint({*names, *(parts[1:2] if chain[0] != parts[0] else ())})


_read_ahead: set[str] = set()


def read_ahead() -> None:
    """Reads the program's files while they are likely to be what was imported: a long run may outlast an edit."""
    for name in sys.modules.keys() - _read_ahead:
        _read_ahead.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_own_module(module):
            linecache.getlines(file)
