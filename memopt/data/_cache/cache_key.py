"""Key of a cached call: a digest of values by their content.

Every value is written down with its type and its length before it, so that no two different values read the same, and
never by pickle, whose bytes change with an object's history. What has no content that can be written down (a lock, a
file, a generator) is refused by name: a key that left it out would find wrong values."""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import hashlib
import logging
import operator
import os
import pathlib
import re
import struct
import sys
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from memopt.data._cache import function_key, function_names

KEY_BYTES = 20
"""160 bits: among 10^12 entries the chance of any two alike is below 10^-24."""


_LONGEST_PATH = 200
"""Characters of a path in a message."""


class Unkeyable(TypeError):
    """A value that no key can be made of: its path from what is cached, and why."""

    def __init__(self, path: str, value: object, reason: str = "") -> None:
        self.path = path
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        super().__init__(
            f"{path} ({self.kind}) cannot be part of a cache key{': ' if reason else ''}{reason}"
        )


class KeyDigest:
    """A running digest. `add` takes a value and the name under which an error would speak of it."""

    def __init__(
        self, ignore: Iterable[str] = (), *, versioned: bool = False, introspected: bool = False
    ) -> None:
        self._hash = hashlib.sha256()
        self._outer: KeyDigest | None = None  # of what an element of a set is in
        self._seen: dict[int, int] = {}
        self._count = 0
        self._kept: list[object] = []  # so that no id is used twice while this runs
        self.inside: list[int] = []  # the containers that are being written down
        self.ignore = frozenset(ignore)
        self.versioned = versioned
        """A version stands for all code: a module counts by its name."""
        self.introspected = introspected
        """Docstrings and annotations count."""
        self.introspects = False
        """Code that was written down asks for docstrings or annotations."""

    def digest(self) -> bytes:
        return self._hash.digest()[:KEY_BYTES]

    def mark(self, tag: str, *sizes: int) -> None:
        """Add the beginning of a value: its kind and its sizes."""
        self._hash.update(struct.pack(f"<B{len(sizes)}q", len(tag), *sizes) + tag.encode())

    def data(self, tag: str, raw: bytes | bytearray | memoryview) -> None:
        self.mark(tag, len(raw))
        self._hash.update(raw)

    def met_before(self, value: object) -> bool:
        """Return whether an object, function or class was added already: then its number stands for it."""
        number = self._number_of(value)
        if number is None:
            self._seen[id(value)] = self._count
            self._count += 1
            self._kept.append(value)
            return False
        self.mark("met", number)
        return True

    def _number_of(self, value: object) -> int | None:
        number = self._seen.get(id(value))
        return self._outer._number_of(value) if number is None and self._outer is not None else number

    def element(self, container: object) -> KeyDigest:
        """Return a separate digest for an element of a container; it knows the containers that it is in."""
        made = self.anew()
        made._outer, made._count = self, self._count
        made.inside = [*self.inside, id(container)]
        return made

    def anew(self) -> KeyDigest:
        """Return an empty digest with the same options."""
        return KeyDigest(self.ignore, versioned=self.versioned, introspected=self.introspected)

    def refused(self, path: str, value: object, reason: str) -> Unkeyable:
        """Return the error for a value, for modules that cannot import this one."""
        return Unkeyable(path, value, reason)

    def add(self, value: Any, path: str) -> None:
        kind = type(value)
        writer = _WRITERS.get(kind)
        try:
            if writer is not None:
                writer(self, value, path)
            else:
                self._other(value, kind, path)
        except RecursionError:
            shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"
            raise Unkeyable(shown, value, "it is nested too deeply") from None

    def items(self, tag: str, values: Iterable[Any], count: int, path: str) -> None:
        self.mark(tag, count)
        for number, value in enumerate(values):
            self.add(value, f"{path}[{number}]")

    def pairs(self, tag: str, values: Mapping[Any, Any], path: str) -> None:
        """Add pairs in their order, since a function may iterate over them in it."""
        self.mark(tag, len(values))
        for name, value in values.items():
            self.add(name, f"a key of {path}")
            self.add(value, f"{path}[{name!r}]")

    def _other(self, value: Any, kind: type, path: str) -> None:
        if _is_of(kind, "torch", "Tensor") or _is_of(kind, "torch.nn.parameter", "Parameter"):
            self._tensor(value, path)
        elif _is_of(kind, "numpy", "ndarray") or _is_of(kind, "numpy", "memmap"):
            self._array(value, path)
        elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic):
            self.data("numpy", _dtype(value))
            self.data("elements", value.tobytes())
        elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].dtype):
            if value.hasobject:
                raise Unkeyable(path, value, "it holds Python objects")
            self.data("numpy.dtype", repr(value if value.names else value.str).encode())
        elif kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
            self.data(f"torch.{kind.__name__}", str(value).encode())
        elif _is_of(kind, "torch", "Size"):
            self.items("torch.Size", value, len(value), path)
        elif isinstance(value, enum.Enum):
            self.data("enum", f"{kind.__module__}.{kind.__qualname__}.{value._name_}".encode())
            self.add(value._value_, f"{path}.value")
            self._derived(value, kind, path, without=_OF_A_MEMBER)
        elif isinstance(value, pathlib.PurePath):
            self._path(value)
            self._derived(value, kind, path)
        elif isinstance(value, types.ModuleType):
            if function_names.is_own_module(value) and not self.versioned:
                raise Unkeyable(path, value, _OWN_MODULE)
            self.data("module", function_names.version_named(value.__name__).encode())
        elif isinstance(value, type):
            function_key.add_class(self, value, path)
        elif function_key.is_callable_with_code(value):
            function_key.add_callable(self, value, path)
            if kind.__module__ == "functools" or function_names.is_own(kind.__module__):
                self._derived(value, kind, path, without=_OF_A_WRAPPER)
        elif kind in _BY_REDUCTION:
            made_by, arguments, *_ = value.__reduce_ex__(4)
            self.data(
                "reduced", f"{function_names.version_named(kind.__module__)}.{kind.__qualname__}".encode()
            )
            self.add(made_by, path)
            self.items("arguments", arguments, len(arguments), path)
        elif isinstance(value, logging.Logger):
            self.data("logger", value.name.encode())  # what it writes is no result
        elif type(value).__module__ in ("typing", "types") and function_key.is_annotation(value):
            function_key.add_annotation(self, value, path)
        else:
            builtin = next((one for one in kind.__mro__ if one in _PLAIN), None)
            if builtin is None:
                self._object(value, kind, path)
            else:
                self._of_builtin(value, kind, builtin, path)

    def _of_builtin(self, value: Any, kind: type, builtin: type, path: str) -> None:
        """Add an object of a subclass of a built-in type: its content as that type, its class and its attributes."""
        if id(value) in self.inside:
            self.mark("itself", len(self.inside) - self.inside.index(id(value)))
            return
        self.inside.append(id(value))
        self.data("derived", f"{kind.__module__}.{kind.__qualname__}".encode())
        self.add(_PLAIN[builtin](value), path)
        self._derived(value, kind, path)
        self.inside.pop()

    def _derived(self, value: Any, kind: type, path: str, without: Container[str] = ()) -> None:
        """Add the rest of an object whose content is added: its class, if that is the program's own, and its
        attributes."""
        if not function_names.is_own(kind.__module__) and not getattr(value, "__dict__", None):
            return
        function_key.add_class(self, kind, path)
        self._attributes(
            value, [one for one in kind.__mro__ if function_names.is_own(one.__module__)], path, without
        )

    def _path(self, value: pathlib.PurePath) -> None:
        """Add a path; for an existing file also its size and modification time, since a changed file is another
        value."""
        self.data("path", os.fsencode(value))
        try:
            there = os.stat(value)
        except OSError:
            self.mark("no file")
        else:
            self.mark("file", there.st_size, there.st_mtime_ns)

    def _array(self, value: Any, path: str) -> None:
        if value.dtype.hasobject:
            raise Unkeyable(path, value, "it holds Python objects")
        self.mark("array", *value.shape)
        self.data("dtype", _dtype(value))
        contiguous = sys.modules["numpy"].ascontiguousarray(value)
        self.data("elements", contiguous.reshape(-1).view("u1") if value.nbytes else b"")

    def _tensor(self, value: Any, path: str) -> None:
        from memopt.data._array_bytes import bytes_of

        torch = sys.modules["torch"]
        if value.layout is not torch.strided or value.is_quantized:
            raise Unkeyable(path, value, f"its layout is {value.layout}; give value.to_dense()")
        if value.is_meta:
            raise Unkeyable(path, value, "a meta tensor has no content")
        self.mark("tensor", *value.shape)
        self.data("dtype", str(value.dtype).encode())
        self.data("elements", bytes_of(value))

    def _object(self, value: Any, kind: type, path: str) -> None:
        """Add an object of a class written in Python: its class, and its attributes."""
        if not _plain_object(kind):
            raise Unkeyable(path, value, _why_not(kind))
        if self.met_before(value):
            return
        function_key.add_class(self, kind, path)
        if dataclasses.is_dataclass(value):
            self.mark("dataclass")
        self._attributes(value, kind.__mro__, path, _OF_A_WRAPPED_FUNCTION)

    def _attributes(self, value: Any, kinds: Iterable[type], path: str, without: Container[str]) -> None:
        state = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in self.ignore}
        for parent in kinds:
            self._slots(value, parent, state)
        named = {name: one for name, one in sorted(state.items()) if name not in without}
        self.mark("object", len(named))
        for name, one in named.items():
            self.data("name", name.encode())
            self.add(one, f"{path}.{name}")

    def _slots(self, value: Any, parent: type, state: dict[str, Any]) -> None:
        """Add what an object has in the slots of one of its classes, by descriptor: `__x` has another name there, and
        one that a subclass has, too, is hidden."""
        private = f"_{parent.__name__.lstrip('_')}__"
        for name, slot in vars(parent).items():
            if not isinstance(slot, types.MemberDescriptorType) or slot.__objclass__ is not parent:
                continue
            bare = f"__{name.removeprefix(private)}" if name.startswith(private) else name
            if name in self.ignore or bare in self.ignore:
                continue
            try:
                held = slot.__get__(value)
            except AttributeError:
                continue  # not set
            state[f"{parent.__qualname__}.{name}" if name in state else name] = held


_OF_A_WRAPPED_FUNCTION = ("__doc__", "__annotations__", "__annotate__", "__type_params__")
"""Attributes that functools.update_wrapper() sets on an object, which are no state of it."""
_OF_A_WRAPPER = (
    *_OF_A_WRAPPED_FUNCTION,
    *(
        "__module__",
        "__name__",
        "__qualname__",
        "__wrapped__",
        "cache_parameters",
        "func",
        "attrname",
        "lock",
    ),
)
"""Attributes that functools sets on a wrapper, beside what is written down of each kind."""
_OF_A_MEMBER = ("_name_", "_value_", "__objclass__", "_sort_order_", "_inverted_", "_hashable_values_")
"""Attributes that an enumeration sets on its members, some of them only once they are asked for."""
_named: Any = namedtuple("_named", "a")
_BY_REDUCTION = {
    operator.itemgetter, operator.attrgetter, operator.methodcaller, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, datetime.timezone, decimal.Decimal, zoneinfo.ZoneInfo, type(_named.a),
}  # fmt: skip
"""Types in C whose __reduce_ex__ gives all their content, in one way for equal ones."""


def _dtype(value: Any) -> bytes:
    """Describe the dtype of a NumPy array or scalar; with fields, also the offset of each."""
    return repr(value.dtype if value.dtype.names else value.dtype.str).encode()


def _is_of(kind: type, module: str, name: str) -> bool:
    return kind.__name__ == name and kind.__module__ == module


def _plain_object(kind: type) -> bool:
    """Return whether attributes are all its state: every class it comes from is written in Python, or `object`."""
    in_c = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
    if kind is object:
        return False  # a mark that is told from others by being itself
    for parent in kind.__mro__[:-1]:
        if parent.__module__ in ("typing", "abc", "collections.abc"):
            continue
        if not parent.__flags__ & _HEAP_TYPE or parent.__module__ in _REFUSED:
            return False
        # Types in C may be heap types too; their own methods are descriptors of kinds that the compiler never makes.
        for name, one in vars(parent).items():
            own = isinstance(one, in_c) and getattr(one, "__objclass__", None) is parent
            if own and name not in ("__dict__", "__weakref__"):
                return False
    return True


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_REFUSED = (
    "_thread",
    "threading",
    "_io",
    "io",
    "socket",
    "_socket",
    "multiprocessing.pool",
    "random",
    "sqlite3",
)


_OWN_MODULE = "what is read from a module through a variable is not known: import the names that are used"


def _why_not(kind: type) -> str:
    if kind.__module__ in _REFUSED:
        return "it has no stable content"
    return "memopt does not know its content"


def _number(digest: KeyDigest, value: int, _: str) -> None:
    digest.data("int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _set(digest: KeyDigest, values: Any, path: str) -> None:
    """Add a set in the order of its elements' digests: a set has no lasting order of its own."""
    each = []
    for value in values:
        one = digest.element(values)
        one.add(value, f"an element of {path}")
        digest.introspects |= one.introspects
        each.append(one.digest())
    digest.mark(type(values).__name__, len(each))
    digest.data("elements", b"".join(sorted(each)))


def _container(write: Callable[[KeyDigest, Any, str], None]) -> Callable[[KeyDigest, Any, str], None]:
    def add(digest: KeyDigest, value: Any, path: str) -> None:
        if id(value) in digest.inside:  # it contains itself: how far up stands for it
            digest.mark("itself", len(digest.inside) - digest.inside.index(id(value)))
            return
        digest.inside.append(id(value))
        write(digest, value, path)
        digest.inside.pop()

    return add


def keyed(
    write: Callable[[KeyDigest], None], ignore: Iterable[str], *, versioned: bool, introspected: bool = False
) -> KeyDigest:
    """A digest that `write` has added to, anew if its code asks for the docstrings that had been left out."""
    digest = KeyDigest(ignore, versioned=versioned, introspected=introspected)
    write(digest)
    if digest.introspects and not introspected:
        return keyed(write, ignore, versioned=versioned, introspected=True)
    return digest


def _listed(tag: str) -> Callable[[KeyDigest, Any, str], None]:
    return _container(lambda digest, value, path: digest.items(tag, value, len(value), path))


def _paired(tag: str) -> Callable[[KeyDigest, Any, str], None]:
    return _container(lambda digest, value, path: digest.pairs(tag, value, path))


def _deque(digest: KeyDigest, value: Any, path: str) -> None:
    digest.add(value.maxlen, f"{path}.maxlen")
    digest.items("deque", value, len(value), path)


def _pattern(digest: KeyDigest, value: Any, path: str) -> None:
    digest.mark("pattern", value.flags)
    digest.add(value.pattern, f"{path}.pattern")


def _default_dict(digest: KeyDigest, value: Any, path: str) -> None:
    digest.add(value.default_factory, f"{path}.default_factory")
    digest.pairs("defaultdict", value, path)


_WRITERS: dict[type, Callable[[KeyDigest, Any, str], None]] = {
    type(None): lambda digest, _, __: digest.mark("None"),
    type(Ellipsis): lambda digest, _, __: digest.mark("Ellipsis"),
    type(NotImplemented): lambda digest, _, __: digest.mark("NotImplemented"),
    bool: lambda digest, value, _: digest.mark("bool", int(value)),
    int: _number,
    float: lambda digest, value, _: digest.data("float", struct.pack("<d", value)),
    complex: lambda digest, value, _: digest.data("complex", struct.pack("<2d", value.real, value.imag)),
    str: lambda digest, value, _: digest.data("str", value.encode("utf-8", "surrogatepass")),
    bytes: lambda digest, value, _: digest.data("bytes", value),
    bytearray: lambda digest, value, _: digest.data("bytearray", value),
    tuple: lambda digest, value, path: digest.items("tuple", value, len(value), path),
    list: _listed("list"),
    deque: _container(_deque),
    dict: _paired("dict"),
    OrderedDict: _paired("OrderedDict"),
    defaultdict: _container(_default_dict),
    Counter: _paired("Counter"),
    types.MappingProxyType: _paired("mappingproxy"),
    types.SimpleNamespace: _container(
        lambda digest, value, path: digest.pairs("namespace", vars(value), path)
    ),
    re.Pattern: _pattern,
    struct.Struct: lambda digest, value, _: digest.data("Struct", value.format.encode()),
    array.array: lambda digest, value, _: digest.data(f"array {value.typecode}", memoryview(value).cast("B")),
    set: _set,
    frozenset: _set,
    range: lambda digest, value, path: digest.items("range", (value.start, value.stop, value.step), 3, path),
    slice: lambda digest, value, path: digest.items("slice", (value.start, value.stop, value.step), 3, path),
    types.CodeType: lambda digest, value, path: function_key.add_compiled(digest, value, path),
}

_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: lambda value: bytearray(memoryview(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: [*list.__iter__(value)],
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    Counter: lambda value: dict(dict.items(value)),
    OrderedDict: lambda value: dict(OrderedDict.items(value)),
    defaultdict: lambda value: defaultdict(value.default_factory, dict.items(value)),
    deque: lambda value: deque(deque.__iter__(value), value.maxlen),
    types.SimpleNamespace: lambda _: None,  # attributes are all it has
    array.array: lambda value: array.array(value.typecode, memoryview(value)),
    struct.Struct: lambda value: struct.Struct(value.format),
}
"""An object of a subclass as one of the type itself, whatever the subclass has put in the place of its methods."""
