"""memopt.data.cached: what a function returns, or a dataset's items, kept on disk."""

from __future__ import annotations

import functools
import html
import operator
import sys
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from memopt import _C
from memopt.data import cache_lease, function_key
from memopt.data.cache_counters import CacheStatistics
from memopt.data.cache_folder import CacheFolder
from memopt.data.cache_key import KeyDigest, Unkeyable, keyed


def cached(
    fn_or_dataset: Any = None,
    dir: str | PathLike[str] | None = None,
    max_size: int | str | None = None,
    *,
    version: str | int | None = None,
    ignore: str | Iterable[str] = (),
    compress: bool = True,
) -> Any:
    """Keeps on disk what a function returns, or a map-style dataset's items: preprocessing is done once, and from then
    on, in any process and on any machine that has the folder, read.

        load = memopt.data.cached(load, "cache", max_size="50GiB")         # a function
        dataset = memopt.data.cached(ImageFolder(...), "cache")            # a dataset: len(), [index]
        @memopt.data.cached(dir="cache", max_size="50GiB", version=2)      # a decorator

    An entry's key is the content of the arguments (tensors, arrays, containers, dataclasses, objects of Python classes;
    of a pathlib.Path also the file's size and time) and what the function is: its compiled code, defaults, the values
    it closes over, the globals and, in the program's own modules, functions and classes it uses, whatever it imports
    itself included; of installed packages name and version. Not known, and refused, is what is read of a module that
    went into a variable, and what code finds by a name that is no constant in it (import_module(name), globals()[name],
    sys.modules, eval). Of a dataset its class and its attributes count, when it is wrapped, and the index.
    The function's own are taken at its first call.

    dir: the folder, made where it is missing; many functions may share it. max_size: bytes, or "50GiB": about what
    all entries in the folder take at most; those used longest ago go. None: no limit.
    version: takes the place of the code, of globals and of the functions called; give another whenever the
    results change. ignore: names of parameters, attributes, closed-over variables and globals that are left out of the
    key. compress: by zstd, where that at least halves a tensor and the library is there (`pip install 'memopt[data]'`);
    what is compressed is not mapped.

    Results are tensors, NumPy arrays, numbers, str, bytes, and lists, tuples, sets and dicts of these; no pickle
    is ever written or read. A hit's tensors and arrays are mapped copy-on-write: writable, changes stay in the
    process. They are contiguous, and share no memory with each other. Do not cache what draws random numbers: it would
    draw them once.

    Returns the function or dataset with `.cache`: `.cache.statistics()`, `.cache.clear()`. Raises TypeError for what
    cannot be keyed or kept, by name. A folder that is full or cannot be written costs one RuntimeWarning."""
    if fn_or_dataset is None:
        return functools.partial(
            cached, dir=dir, max_size=max_size, version=version, ignore=ignore, compress=compress
        )
    if dir is None:
        raise TypeError("memopt.data.cached needs dir=, the folder that entries are kept in")
    limit = None if max_size is None else _C.parse_size(max_size)
    if limit == 0:
        raise ValueError("memopt.data.cached: max_size=0 keeps nothing; leave it out for no limit")
    names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    is_dataset = hasattr(fn_or_dataset, "__getitem__") and not isinstance(fn_or_dataset, type)
    if not is_dataset and not callable(fn_or_dataset):
        raise TypeError(
            f"memopt.data.cached: a {type(fn_or_dataset).__qualname__} is neither a function nor a map-style dataset "
            "(__getitem__ and __len__); of a stream, cache the function that makes an item"
        )
    cache = Cache(fn_or_dataset, CacheFolder(dir, limit, compress), version, names)
    wrapped = CachedDataset(fn_or_dataset, cache) if is_dataset else CachedFunction(fn_or_dataset, cache)
    cache.folder.probe()
    return wrapped


class Cache:
    """The entries of one function or dataset in a folder: `.statistics()`, `.clear()`."""

    def __init__(
        self, made_by: Any, folder: CacheFolder, version: str | int | None, ignore: tuple[str, ...]
    ) -> None:
        self.folder = folder
        self.ignore = ignore
        self.name = getattr(made_by, "__qualname__", type(made_by).__qualname__)
        self.made_by = made_by
        self.version = version
        self._identity: tuple[bytes, frozenset[str]] | None = None

    def identity(self) -> tuple[bytes, frozenset[str]]:
        """The digest of what makes the values, taken once, and what its code asks for of classes and functions."""
        if self._identity is None:
            made = self._keyed(
                lambda digest: function_key.add_cached(digest, self.made_by, self.version, self.name)
            )
            self._identity = made.digest(), made.asked
        return self._identity

    def key(self, arguments: Any, path: str) -> str:
        made_by, asked = self.identity()

        def write(digest: KeyDigest) -> None:
            digest.data("made by", made_by)
            digest.add(arguments, path)

        return self._keyed(write, asked).digest().hex()

    def _keyed(self, write: Callable[[KeyDigest], None], asked: Iterable[str] = ()) -> KeyDigest:
        try:
            return keyed(write, self.ignore, versioned=self.version is not None, asked=asked)
        except Unkeyable as error:
            raise _explained(error) from None

    def value(self, key: str, make: Callable[[], Any]) -> Any:
        """The entry's value; where there is none, it is made, and kept."""
        counters = self.folder.counters
        found, value = self.folder.get(key)
        if found:
            counters.add("hits")
            return value
        to_make, lease = self.folder.lease(key)
        try:
            # Who had the lease may have made it since the first look.
            if self.folder.has(key) if to_make else self.folder.wait(key):
                found, value = self.folder.get(key)
                if found:
                    counters.add("hits")
                    if not to_make:
                        counters.add("waited")
                    return value
            counters.add("misses")
            value = make()
            self.folder.put(key, value)
        finally:
            if lease is not None:
                cache_lease.release(lease)
        return value

    def statistics(self) -> CacheStatistics:
        """Hits, misses, bytes and the rest, since this object was made; of loaders' workers too."""
        return self.folder.counters.total()

    def clear(self) -> int:
        """Removes all entries in the folder, other functions' too; returns how many there were."""
        return self.folder.clear()

    def __repr__(self) -> str:
        limit = "" if self.folder.max_size is None else f", at most {_C.format_size(self.folder.max_size)}"
        return f"{self.name} kept in {self.folder.folder}{limit}; {self.statistics()}"

    def _repr_html_(self) -> str:
        title = f"<b>{html.escape(self.name)}</b> kept in {html.escape(self.folder.folder)}"
        return f"{title}{self.statistics()._repr_html_()}"


def _explained(error: Unkeyable) -> TypeError:
    return TypeError(
        f"memopt.data.cached: {error}; leave it out of the key by ignore=(name,) if results do not hang on it, or, for "
        "a global or a function that is called, give version="
    )


class CachedFunction:
    """A function whose results are kept. Made by memopt.data.cached."""

    def __init__(self, function: Any, cache: Cache) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.cache = cache
        self._signature = function_key.signature_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self.cache.key(self._named(args, kwargs), f"the arguments of {self.cache.name}")
        return self.cache.value(key, lambda: self.__wrapped__(*args, **kwargs))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments by parameter, defaults included: f(1), f(x=1) and, if y=2 is the default, f(1, 2) are one."""
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)  # a TypeError here is the call's own
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name not in self.cache.ignore}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the object it is called on is an argument, and keyed by its content."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"memopt.data.cached({self.cache!r})"

    def _repr_html_(self) -> str:
        return self.cache._repr_html_()

    def __reduce__(self) -> Any:
        """A decorated function is found by its name, as functions are; one that was wrapped elsewhere goes itself."""
        home: Any = sys.modules.get(getattr(self, "__module__", ""), None)
        for part in getattr(self, "__qualname__", "").split("."):
            home = getattr(home, part, None)
        return self.__qualname__ if home is self else (CachedFunction, (self.__wrapped__, self.cache))


class CachedDataset:
    """A map-style dataset whose items are kept. Made by memopt.data.cached; other attributes are the dataset's."""

    def __init__(self, dataset: Any, cache: Cache) -> None:
        self.dataset = dataset
        self.cache = cache
        cache.identity()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        try:
            number: Any = operator.index(index)
        except TypeError:
            number = index
        else:
            if number < 0:
                number += len(self.dataset)
        return self.cache.value(self.cache.key(number, "the index"), lambda: self.dataset[index])

    def __iter__(self) -> Any:
        for index in range(len(self)):
            yield self[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"memopt.data.cached({self.cache!r})"

    def _repr_html_(self) -> str:
        return self.cache._repr_html_()
