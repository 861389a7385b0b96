"""What a function is, for a cache: its compiled code, defaults, closure, the globals it reads, and so on down through
the functions and classes that it calls, as far as they are the program's own.

Compiled code, not text: a comment or a line moved changes nothing, two lambdas on one line are two, and code that was
typed at a prompt has it too. It differs between minor versions of Python, whose entries are therefore kept apart. Of
installed packages and the standard library the name and version count, not the code."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.data.cache_key import KeyDigest

_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_own(module_name: str | None) -> bool:
    """Whether a module is the program's: not built in, of the standard library or of an installed package."""
    module = sys.modules.get(module_name or "")
    if module is None:
        return True  # made at run time: no package has it
    path = getattr(module, "__file__", None)
    if path is None:
        return module_name in ("__main__", "__mp_main__") or not _built_in(module)
    return not (path.startswith(_INSTALLED) or "/site-packages/" in path or "/dist-packages/" in path)


def _built_in(module: types.ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", "built-in") in ("built-in", "frozen")


def version_named(module_name: str) -> str:
    """A module's name, and the version of the package that it belongs to."""
    package = sys.modules.get(module_name.partition(".")[0])
    version = getattr(package, "__version__", "")
    return f"{_name_of_main(module_name)} {version if isinstance(version, str) else ''}"


def _name_of_main(module_name: str | None) -> str:
    return "__main__" if module_name == "__mp_main__" else str(module_name)  # a spawned worker's __main__


def is_callable_with_code(value: object) -> bool:
    kinds = (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.MethodWrapperType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
        functools.partial,
        staticmethod,
        classmethod,
        property,
        functools.cached_property,
    )
    return isinstance(value, kinds) or (callable(value) and hasattr(value, "__wrapped__"))


def add_callable(digest: KeyDigest, value: Any, path: str) -> None:
    """Any callable that has code, or a name under which an installed package has it."""
    if isinstance(value, types.FunctionType):
        add_function(digest, value, path)
    elif isinstance(value, types.MethodType):
        digest.mark("method")
        digest.add(value.__self__, f"{path}.__self__")
        digest.add(value.__func__, path)
    elif isinstance(value, functools.partial):
        digest.mark("partial")
        digest.add(value.func, f"{path}.func")
        digest.add(value.args, f"{path}.args")
        digest.add(value.keywords, f"{path}.keywords")
    elif isinstance(value, staticmethod | classmethod):
        digest.mark(type(value).__name__)
        digest.add(value.__func__, path)
    elif isinstance(value, property):
        digest.items("property", (value.fget, value.fset, value.fdel), 3, path)
    elif isinstance(value, functools.cached_property):
        digest.mark("cached_property")
        digest.add(value.func, path)
    elif isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
        digest.data("wrapped by", type(value).__qualname__.encode())
        digest.add(value.__wrapped__, path)
    else:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            digest.add(owner, f"{path}.__self__")
        home = getattr(value, "__objclass__", None) or (owner if isinstance(owner, type) else None)
        module = getattr(value, "__module__", None) or getattr(home, "__module__", None) or "builtins"
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", repr(value))
        digest.data("built in", f"{version_named(module)} {name}".encode())


def add_function(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """A function written in Python. One of an installed package counts by name and version, if it closes over
    nothing."""
    if digest.met_before(function):
        return
    if not is_own(function.__module__) and function.__closure__ is None:
        digest.data("function", f"{version_named(function.__module__)}.{function.__qualname__}".encode())
    else:
        digest.mark("own function")
        add_code(digest, function.__code__, path)
        if is_own(function.__module__):
            add_globals(digest, function, path)
    add_bindings(digest, function, path)


def add_bindings(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """What a function carries beside its code: defaults and the values it closes over."""
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = [*zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)]
    named += sorted((function.__kwdefaults__ or {}).items())
    for name, value in named:
        if name not in digest.ignore:
            digest.data("default", name.encode())
            digest.add(value, f"the default of {path}'s parameter {name!r}")
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in digest.ignore:
            continue
        digest.data("closure", name.encode())
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            digest.mark("empty")
        else:
            digest.add(value, f"{name!r}, which {path} closes over,")


def add_code(digest: KeyDigest, code: types.CodeType, path: str) -> None:
    digest.mark("code", *sys.version_info[:2], code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    digest.data("instructions", code.co_code)
    digest.data("exceptions", getattr(code, "co_exceptiontable", b""))
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        digest.add(names, path)
    digest.add(code.co_consts, f"a constant of {path}")


def add_globals(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """The globals that the code reads, by value; of a module of the program's own, what is read of it."""
    for name, attribute in sorted(globals_read(function.__code__), key=str):
        if name in digest.ignore or name not in function.__globals__:
            continue  # a built-in function, or not there (the call itself will say so)
        value = function.__globals__[name]
        digest.data("global", f"{name}.{attribute}".encode())
        if isinstance(value, types.ModuleType) and attribute and is_own(value.__name__):
            if hasattr(value, attribute):
                digest.add(getattr(value, attribute), f"{name}.{attribute}, which {path} uses,")
        else:
            digest.add(value, f"the global {name!r}, which {path} uses,")


def globals_read(code: types.CodeType) -> set[tuple[str, str | None]]:
    """(global, attribute taken of it at once, or None) of a code object and those within it."""
    found: set[tuple[str, str | None]] = set()
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]
    for number, one in enumerate(instructions):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            following = instructions[number + 1] if number + 1 < len(instructions) else None
            taken = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            found.add((str(one.argval), str(following.argval) if taken and following else None))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_read(constant)
    return found


_OF_EVERY_CLASS = {
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__qualname__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__abstractmethods__",
    "_abc_impl",
    "__parameters__",
    "__orig_bases__",
    "__match_args__",
    "__slots__",
    "__dataclass_fields__",
    "__dataclass_params__",
}


def add_class(digest: KeyDigest, kind: type, path: str) -> None:
    """A class: of the program's own its bases and all it defines, else its name and version."""
    digest.data("class", f"{version_named(kind.__module__)}.{kind.__qualname__}".encode())
    if not is_own(kind.__module__) or digest.met_before(kind):
        return
    digest.items("bases", kind.__bases__, len(kind.__bases__), path)
    for name, value in sorted(vars(kind).items()):
        slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
        if name in _OF_EVERY_CLASS or name in digest.ignore or slot:
            continue
        digest.data("member", name.encode())
        digest.add(value, f"{kind.__qualname__}.{name}")


def add_cached(digest: KeyDigest, function: Any, version: str | int | None, name: str) -> None:
    """The identity of what is cached. With a version that takes the place of all code; values that a function, its
    object or its partial carries count even so."""
    if version is None:
        digest.add(function, name)
        return
    digest.data("version", f"{type(version).__name__} {version}".encode())
    while isinstance(function, functools.partial):
        digest.add(function.args, f"{name}.args")
        digest.add(function.keywords, f"{name}.keywords")
        function = function.func
    if isinstance(function, types.MethodType):
        _add_state(digest, function.__self__, f"{name}.__self__")
        function = function.__func__
    kind = function if isinstance(function, type) or hasattr(function, "__qualname__") else type(function)
    digest.data("name", f"{_name_of_main(kind.__module__)}.{kind.__qualname__}".encode())
    if isinstance(function, types.FunctionType):
        add_bindings(digest, function, name)
    elif kind is type(function):
        _add_state(digest, function, name)


def _add_state(digest: KeyDigest, value: Any, name: str) -> None:
    if isinstance(value, type | types.ModuleType):
        digest.data("name", f"{value.__name__}".encode())
        return
    state = {one: held for one, held in sorted(vars(value).items()) if one not in digest.ignore}
    for one, held in state.items():
        digest.data("attribute", one.encode())
        digest.add(held, f"{name}.{one}")


def signature_of(function: Any) -> inspect.Signature | None:
    """None where there is none to be had (some functions in C): then arguments are keyed as they were written."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
