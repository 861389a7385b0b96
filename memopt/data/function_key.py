"""What a function is, for a cache: its compiled code, defaults, closure, the globals it reads, and so on down through
the functions and classes that it calls, as far as they are the program's own.

Compiled code, not text: a comment or a line moved changes nothing, two lambdas on one line are two, and code that was
typed at a prompt has it too. It differs between minor versions of Python, whose entries are therefore kept apart. Of
installed packages and the standard library the name and version count, not the code."""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import runpy
import sys
import sysconfig
import types
from typing import TYPE_CHECKING, Any

from memopt.data.code_reads import Read, names_in, reads_of

if TYPE_CHECKING:
    from memopt.data.cache_key import KeyDigest

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
    package = sys.modules.get(module_name.partition(".")[0])
    version = getattr(package, "__version__", "")
    return f"{_name_of_main(module_name)} {version if isinstance(version, str) else ''}"


def _name_of_main(module_name: str | None) -> str:
    return "__main__" if module_name == "__mp_main__" else str(module_name)  # a spawned worker's __main__


_LRU_CACHE = type(functools.lru_cache(lambda: None))
_dispatching: Any = functools.singledispatch(len)
_SINGLE_DISPATCH = _dispatching.__code__
"""What dispatches is this code of the library's; its caches are no part of what it does."""


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
        _LRU_CACHE,
    )
    return isinstance(value, kinds) or _is_named_in_c(value) or _is_cached(value)


def _is_named_in_c(value: Any) -> bool:
    """Whether it is of a kind of an installed package's own, for functions that their names tell apart."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("numpy", "ufunc"):
        return not value.__name__.endswith("(vectorized)")  # numpy.frompyfunc's: a function of somebody's
    return kind.__name__ == "cython_function_or_method"


def _is_cached(value: object) -> bool:
    """Whether it is memopt.data.cached's: what it returns is what the function or dataset in it does."""
    kind = type(value)
    return kind.__name__ in ("CachedFunction", "CachedDataset") and kind.__module__ == "memopt.data.caching"


def add_callable(digest: KeyDigest, value: Any, path: str) -> None:
    """Any callable that has code, or a name under which an installed package has it."""
    if isinstance(value, types.FunctionType) and value.__code__ is _SINGLE_DISPATCH:
        digest.mark("singledispatch")
        digest.add(value.registry, f"{path}.registry")  # type: ignore[attr-defined]
    elif isinstance(value, types.FunctionType):
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
    elif isinstance(value, _LRU_CACHE):
        digest.mark("lru_cache")
        digest.add(value.__wrapped__, path)
    elif _is_cached(value):
        if not digest.met_before(value):
            digest.mark("cached")
            version, around = value.cache.version, digest.versioned
            digest.versioned = around or version is not None
            add_cached(digest, value.cache.made_by, version, path)
            digest.versioned = around
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
            add_attributes(digest, function, path)
    add_bindings(digest, function, path)


def add_attributes(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """What was set on a function, as f.limit = 3; its names and annotations where code asks for them."""
    for name, value in sorted(vars(function).items()):
        if name not in digest.ignore:
            digest.data("attribute", name.encode())
            digest.add(value, f"{path}.{name}")
    for name in sorted(digest.asked & {"__name__", "__qualname__"}):
        digest.data(name, str(getattr(function, name)).encode())
    if "__annotations__" in digest.asked:
        add_annotations(digest, function, path)


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
            continue
        if is_own_module(value) and not digest.versioned:
            for read in reads_of(function.__code__):
                if read.scope == "closure" and read.root == name and not _ignored(digest, read):
                    digest.data("read", _dotted(read).encode())
                    add_read(digest, value, read, path)
        else:
            digest.add(value, f"{name!r}, which {path} closes over,")


def add_code(digest: KeyDigest, code: types.CodeType, path: str) -> None:
    digest.mark("code", *sys.version_info[:2], code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    digest.data("instructions", code.co_code)
    digest.data("exceptions", getattr(code, "co_exceptiontable", b""))
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        digest.add(names, path)
    digest.add(code.co_consts, f"a constant of {path}")
    digest.asking |= {_ASKED[name] for name in names_in(code) & _ASKED.keys()}


def add_globals(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """The globals that the code reads and the modules that it imports, by value; of a module of the program's own, what
    is read of it."""
    for read in reads_of(function.__code__):
        if read.scope == "closure" or _ignored(digest, read) or not _is_found(function, read):
            continue
        if read.scope == "import":
            add_import(digest, function, read, path)
        else:
            add_global(digest, function, read, path)


def add_global(digest: KeyDigest, function: types.FunctionType, read: Read, path: str) -> None:
    if not read.root:
        if read.used:  # else it only goes to a variable, of which it is read
            raise digest.refused(f"its own module, which {path} uses,", sys.modules, _FINDS)
    elif read.root in function.__globals__:
        digest.data("global", _dotted(read).encode())
        add_read(digest, function.__globals__[read.root], read, path)
    elif hasattr(builtins, read.root):  # else not there: the call itself will say so
        _check_finder(digest, getattr(builtins, read.root), read, path)


def _finder_of(value: Any, chain: tuple[str, ...]) -> Any:
    """The first of an object and its attributes, one of the other, by which code finds modules and globals by name."""
    for name in (*chain, None):
        if any(value is finder for finder in _FINDERS):
            return value
        if not isinstance(value, types.ModuleType) or name is None:
            return None
        value = getattr(value, name, None)


def _check_finder(digest: KeyDigest, value: Any, read: Read, path: str) -> bool:
    """Whether what is read is a finder: refused unless the code says what it finds."""
    finder = _finder_of(value, read.chain)
    if finder is not None and not read.resolved and not digest.versioned:
        raise digest.refused(f"{_dotted(read)!r}, which {path} uses,", finder, _FINDS)
    return finder is not None


_FINDERS = (
    sys.modules,
    builtins.__import__,
    importlib.__import__,
    importlib.import_module,
    importlib.reload,
    importlib.util.module_from_spec,
    pkgutil.resolve_name,
    runpy.run_module,
    runpy.run_path,
    builtins.globals,
    builtins.eval,
    builtins.exec,
)
_FINDS = (
    "what it finds is not known before it runs: import by a statement, or pass what is found as an argument"
)


def add_import(digest: KeyDigest, function: types.FunctionType, read: Read, path: str) -> None:
    """What an import statement within a function brings. It is imported now, as the function would do: without that its
    code is not known."""
    digest.data("import", f"{read.level} {_dotted(read)}".encode())
    try:
        name = importlib.util.resolve_name(
            "." * read.level + read.root, function.__globals__.get("__package__")
        )
        value = importlib.import_module(name)
        taken = read.chain[:1]
        if not read.whole and taken and not hasattr(value, taken[0]) and hasattr(value, "__path__"):
            importlib.import_module(f"{name}.{taken[0]}")  # a submodule that nobody has imported yet
    except ImportError:
        digest.mark("not there")  # an optional one: the function does without, or says so itself
        return
    if read.whole:
        value = sys.modules[name.partition(".")[0]]
    add_read(digest, value, read, path)


def _is_found(function: types.FunctionType, read: Read) -> bool:
    """Whether what a read is found by is a finder, and not something else of the same name."""
    if not read.finder:
        return True
    (by,) = read.finder
    if by.scope == "import":
        return _finder_of(sys.modules.get(by.root), by.chain) is not None
    if by.scope == "global":
        root = function.__globals__.get(by.root, getattr(builtins, by.root, None))
        return _finder_of(root, by.chain) is not None
    return False  # closed over: refused by itself


def add_read(digest: KeyDigest, value: Any, read: Read, path: str) -> None:
    """What is read of a value: of a module of the program's own the attributes, one after the other."""
    if _check_finder(digest, value, read, path):
        return
    taken = 0
    while taken < len(read.chain) and is_own_module(value):
        if not hasattr(value, read.chain[taken]):
            digest.mark("not there")  # the call itself will say so
            return
        value = getattr(value, read.chain[taken])
        taken += 1
    if is_own_module(value) and not read.used:
        digest.data("module", version_named(value.__name__).encode())
        return
    name = ".".join((read.root, *read.chain[:taken]))
    called = name if taken else f"the {read.scope} {name!r}"
    digest.add(value, f"{called}, which {path} uses,")


def _dotted(read: Read) -> str:
    return ".".join((read.root, *read.chain))


def _ignored(digest: KeyDigest, read: Read) -> bool:
    """By its name, by that of anything it is read of, or, of `from a import b`, as b."""
    parts = (read.root, *read.chain)
    names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not digest.ignore.isdisjoint({*names, *(read.chain[:1] if read.scope == "import" else ())})


_OF_EVERY_CLASS = {
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__classcell__",
    "__classdictcell__",
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
    "__slots__",
    "__dataclass_fields__",
    "__dataclass_params__",
}


_ASKED = dict(zip(_OF_EVERY_CLASS, _OF_EVERY_CLASS, strict=True)) | {
    "__name__": "__name__",
    "getdoc": "__doc__",
    "fields": "__annotations__",
    "get_annotations": "__annotations__",
    "get_type_hints": "__annotations__",
    "signature": "__annotations__",
    "__dataclass_fields__": "__annotations__",
}
"""By a name in code, what of classes and functions counts because of it, and does not otherwise."""
_OF_ENUMERATIONS = {
    "_value2member_map_",
    "_hashable_values_",
    "_unhashable_values_",
    "_unhashable_values_map_",
}
"""What an enumeration's class adds to as it is used; its members have it, too."""


def add_class(digest: KeyDigest, kind: type, path: str) -> None:
    """A class: of the program's own its bases and all it defines, else its name and version."""
    digest.data("class", f"{version_named(kind.__module__)}.{kind.__qualname__}".encode())
    if not is_own(kind.__module__) or digest.met_before(kind):
        return
    digest.items("bases", kind.__bases__, len(kind.__bases__), path)
    if type(kind) is not type:
        digest.data("metaclass", b"")
        add_class(digest, type(kind), path)
    passed_over = _OF_EVERY_CLASS - digest.asked | {"__annotations__", "__dataclass_fields__", *digest.ignore}
    if issubclass(kind, enum.Enum):
        passed_over |= _OF_ENUMERATIONS
    for name, value in sorted(vars(kind).items()):
        slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
        if name in passed_over or slot:
            continue
        digest.data("member", name.encode())
        digest.add(value, f"{kind.__qualname__}.{name}")
    for field in vars(kind).get("__dataclass_fields__", {}).values():
        digest.data("field", f"{field.name} {[getattr(field, name, None) for name in _FLAGS]}".encode())
        for name in ("default", "default_factory", "metadata"):
            digest.add(getattr(field, name), f"the {name} of {kind.__qualname__}.{field.name}")
    if "__annotations__" in digest.asked:
        add_annotations(digest, kind, path)


_FLAGS = ("init", "repr", "hash", "compare", "kw_only")
"""Of a dataclass's field."""


def add_annotations(digest: KeyDigest, value: Any, path: str) -> None:
    """Of a function, or a class's own. Texts are what they name, if that is there."""
    try:
        written = inspect.get_annotations(value, eval_str=True)
    except Exception:  # whatever a text raises: a name that only type checkers have
        if sys.version_info >= (3, 14):
            import annotationlib

            written = annotationlib.get_annotations(value, format=annotationlib.Format.FORWARDREF)
        else:
            written = inspect.get_annotations(value)
    digest.mark("annotations", len(written))
    for name, one in written.items():
        digest.data("name", name.encode())
        add_annotation(digest, one, f"{path}'s annotation of {name!r}")


def is_annotation(value: object) -> bool:
    """Whether it is what typing makes of types, as list[int], int | None or a TypeVar."""
    return isinstance(getattr(value, "__args__", None), tuple) or type(value).__module__ == "typing"


def add_annotation(digest: KeyDigest, value: Any, path: str) -> None:
    """A type, a text, or what typing makes of types."""
    arguments = getattr(value, "__args__", None)
    if isinstance(arguments, tuple) and not isinstance(value, type):
        digest.data("generic", f"{type(value).__module__}.{type(value).__qualname__}".encode())
        digest.add(getattr(value, "__origin__", None), path)
        digest.mark("arguments", len(arguments))
        for one in (*arguments, *getattr(value, "__metadata__", ())):
            add_annotation(digest, one, path)
    elif type(value).__module__ in ("typing", "annotationlib"):
        digest.data("annotation", repr(value).encode())
    else:
        digest.add(value, path)


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
