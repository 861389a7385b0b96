"""Cache keys of functions and classes: source, defaults, closure, the globals that are read, and so on down through the
functions and classes that are called, as far as they are the program's own.

Of installed packages and the standard library the name and version count, not the code. A function without source (made
by exec(), or edited since it was imported) is keyed by its compiled code, which differs between versions of Python."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import re
import sys
import types
from typing import TYPE_CHECKING, Any

from memopt.data._cache import function_names
from memopt.data._cache.function_names import (
    IMPORT,
    Chain,
    codes_in,
    is_own,
    is_own_module,
    name_of_main,
    version_named,
)

if TYPE_CHECKING:
    from memopt.data._cache.cache_key import KeyDigest

_dispatching: Any = functools.singledispatch(len)
_SINGLE_DISPATCH = _dispatching.__code__
"""The library's code of every single-dispatch function; its caches are no part of what it does."""
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}
"""Callables and descriptors by what they consist of."""
_BUILT_IN = (
    types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip


def is_callable_with_code(value: object) -> bool:
    """Return whether it is a function, made of functions, or named in a library."""
    kinds = (types.FunctionType, *_BUILT_IN, *_PARTS)
    return isinstance(value, kinds) or _is_named_in_c(value) or _is_cached(value)


def _is_named_in_c(value: Any) -> bool:
    """Return whether it is of a kind of an installed package's own, for functions that their names tell apart."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("numpy", "ufunc"):
        return not value.__name__.endswith("(vectorized)")  # numpy.frompyfunc's: a function of somebody's
    return kind.__name__ == "cython_function_or_method"


def _is_cached(value: object) -> bool:
    """Return whether it is memopt.data.cached's: what it returns is what the function or dataset in it does."""
    kind = type(value)
    return (
        kind.__name__ in ("CachedFunction", "CachedDataset")
        and kind.__module__ == "memopt.data._cache.caching"
    )


def add_callable(digest: KeyDigest, value: Any, path: str) -> None:
    """Any callable that has code, or a name under which an installed package has it."""
    if isinstance(value, types.FunctionType) and value.__code__ is _SINGLE_DISPATCH:
        digest.mark("singledispatch")
        digest.add(value.registry, f"{path}.registry")  # type: ignore[attr-defined]
    elif isinstance(value, types.FunctionType):
        add_function(digest, value, path)
    elif (kind := next((kind for kind in _PARTS if isinstance(value, kind)), None)) is not None:
        digest.mark(kind.__name__)
        for part in _PARTS[kind]:
            digest.add(getattr(value, part), f"{path}.{part}")
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
    """A function written in Python. A library's counts by name, version and place, and by what it closes over."""
    if digest.met_before(function):
        return
    code = function.__code__
    if is_own(_module_of(function)):
        digest.mark("own function")
        add_code(digest, function, path)
    else:
        version = version_named(_module_of(function))
        place = "" if version.endswith(" ") else code.co_firstlineno
        digest.data("function", f"{version}.{code.co_qualname} {place}".encode())
    if is_own(function.__module__):
        add_attributes(digest, function, path)
    add_bindings(digest, function, path)


def _is_generated(value: Any) -> bool:
    """Return whether it is a method that the standard library has made from a class's fields, which count."""
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return False
    module, name = _module_of(function), function.__code__.co_qualname
    if module in ("dataclasses", "reprlib") and hasattr(function, "__wrapped__"):
        return _is_generated(function.__wrapped__)
    if module in ("collections", "dataclasses", "enum"):
        return name.startswith("namedtuple.") or name == "_replace" or name.endswith("._generate_next_value_")
    made = function.__code__.co_filename == "<string>"
    return made and (name.startswith("__create_fn__.") or (name, module[:11]) == ("<lambda>", "namedtuple_"))


def _module_of(function: types.FunctionType) -> str:
    """The module that a function was written in, whatever functools.wraps() has made of its __module__."""
    return str(function.__globals__.get("__name__"))


def add_attributes(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """Attributes set on a function, as f.limit = 3; its docstring and annotations where code asks for such."""
    digest.data("name", function.__qualname__.encode())
    for name, value in sorted(vars(function).items()):
        if name not in digest.ignore:
            digest.data("attribute", name.encode())
            digest.add(value, f"{path}.{name}")
    if digest.introspected:
        digest.add(function.__doc__, f"{path}.__doc__")
        add_annotations(digest, function, path)


def add_bindings(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """Defaults and the values that a function closes over."""
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
        if digest.versioned or not is_own_module(value):  # else what is read of it counts, by add_code
            digest.add(value, f"{name!r}, which {path} closes over,")


def add_code(digest: KeyDigest, function: types.FunctionType, path: str) -> None:
    """The source of a function, and the values that names in it have."""
    code = function.__code__
    loaded = {name for one in codes_in(code) for name in one.co_names}
    texts = {text for one in codes_in(code) for text in one.co_consts if isinstance(text, str)}
    digest.introspects |= not _INTROSPECTION.isdisjoint(loaded | texts)

    def compiled(code: types.CodeType) -> bytes:
        made = digest.anew()
        add_compiled(made, code, path)
        return made.digest()

    reads: set[Chain] = set()
    try:
        node = function_names.node_of(function, compiled)
        if node is not None:
            body = function_names.body_of(node)
            reads = function_names.reads_of(body)
    except RecursionError:
        node = None
    if node is None:
        add_compiled(digest, code, path)
        named = [
            one for part in codes_in(code) for one in dis.get_instructions(part) if one.opcode in dis.hasname
        ]
        loaded = {one.argval for one in named if not re.search("ATTR|METHOD", one.opname)}
        finds = {one.argval for one in named} & function_names.FINDER_ATTRIBUTES
        if not digest.versioned and (finds or any(one.opname == "IMPORT_NAME" for one in named)):
            raise digest.refused(path, function, _NO_SOURCE)
    else:
        digest.mark(type(node).__name__, *_parameters(code))
        digest.add(code.co_varnames[: sum(_parameters(code)[1:])], path)
        digest.data("source", function_names.text_of(body).encode("utf-8", "surrogatepass"))
    known = loaded.union(code.co_freevars)
    # Without source any name counts; private names within a class have another name in code than in source.
    reads |= {(name,) for name in known.difference(step for chain in reads for step in chain)}
    values: dict[str, Any] = {}
    for chain in sorted(reads):
        if chain[0].startswith(IMPORT) or chain[0] in known:
            values.update(function_names.read(digest, function, chain, path))
    for name, value in sorted(values.items(), key=lambda item: item[0]):
        digest.data("read", name.encode())
        digest.add(value, f"{name.removeprefix(IMPORT)!r}, which {path} uses,")


def _parameters(code: types.CodeType) -> tuple[int, int, int, int, int]:
    variable = [int(bool(code.co_flags & flag)) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)]
    return code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount, variable[0], variable[1]


def add_compiled(digest: KeyDigest, code: types.CodeType, path: str) -> None:
    """Compiled code, wherever it stands in its file."""
    digest.mark("code", *sys.version_info[:2], code.co_flags, *_parameters(code))
    digest.data("instructions", code.co_code)
    digest.data("exceptions", code.co_exceptiontable)
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts):
        digest.add(names, f"a constant of {path}")


_NO_SOURCE = "its source is not available, so the modules and names that it uses are not known"


_OF_EVERY_CLASS = set(
    """__module__ __doc__ __dict__ __weakref__ __classcell__ __classdictcell__ __qualname__ __firstlineno__
    __static_attributes__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ __abstractmethods__
    _abc_impl __parameters__ __orig_bases__ __dataclass_fields__ __dataclass_params__""".split()
)
_INTROSPECTION = set(
    "__doc__ __annotations__ __dataclass_fields__ fields get_annotations get_type_hints getdoc signature".split()
)
"""Names in code because of which docstrings and annotations count, which do not otherwise."""
_OF_ENUMERATIONS = {"_member_map_", "_missing_", "_generate_next_value_", "_new_member_", "_boundary_"}
"""Of the names that enumerations reserve, those that do not follow from the others."""


def add_class(digest: KeyDigest, kind: type, path: str) -> None:
    """A class: of the program's own its bases and all it defines, else its name and version."""
    digest.data("class", f"{version_named(kind.__module__)}.{kind.__qualname__}".encode())
    if not is_own(kind.__module__) or digest.met_before(kind):
        return
    digest.items("bases", kind.__bases__, len(kind.__bases__), path)
    if type(kind) is not type:
        digest.data("metaclass", b"")
        add_class(digest, type(kind), path)
    passed_over = _OF_EVERY_CLASS | digest.ignore
    if issubclass(kind, enum.Enum):
        passed_over |= {name for name in vars(kind) if re.fullmatch("_[^_].*_", name)} - _OF_ENUMERATIONS
    for name, value in sorted(vars(kind).items()):
        slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
        if name in passed_over or slot or _is_generated(value):
            continue
        digest.data("member", name.encode())
        digest.add(value, f"{kind.__qualname__}.{name}")
    for field in vars(kind).get("__dataclass_fields__", {}).values():
        flags = [getattr(field, name, None) for name in _FLAGS]
        digest.data("field", f"{field.name} {field._field_type} {flags}".encode())
        for name in ("default", "default_factory", "metadata"):
            digest.add(getattr(field, name), f"the {name} of {kind.__qualname__}.{field.name}")
    parameters = vars(kind).get("__dataclass_params__")
    digest.add([getattr(parameters, name, None) for name in _PARAMETERS], path)
    if digest.introspected:
        digest.add(vars(kind).get("__doc__"), f"{path}.__doc__")
        add_annotations(digest, kind, path)


_FLAGS = ("init", "repr", "hash", "compare", "kw_only")
_PARAMETERS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
"""Of a dataclass's field, and of a dataclass: its methods are made from these."""


def add_annotations(digest: KeyDigest, value: Any, path: str) -> None:
    """Add the annotations of a function, or a class's own. A text stands for what it names, if that exists."""
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
    """Return whether it is what typing makes of types, as list[int], int | None or a TypeVar."""
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
    digest.data("name", f"{name_of_main(kind.__module__)}.{kind.__qualname__}".encode())
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
    """Return the signature; None if there is none (some functions in C): then arguments are keyed as they were
    written."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
