"""memopt.data.cached: results of functions and items of datasets, kept on disk."""

from __future__ import annotations

import functools
import html
import operator
import sys
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from memopt import _C
from memopt._runtime import arguments
from memopt.data._cache import cache_folder, function_key, function_names
from memopt.data._cache.cache_counters import CacheStatistics
from memopt.data._cache.cache_folder import CacheFolder
from memopt.data._cache.cache_key import KeyDigest, Unkeyable, keyed


def cached(
    fn_or_dataset: Any = None,
    dir: str | PathLike[str] | None = None,
    max_size: int | str | None = None,
    *,
    version: str | int | None = None,
    ignore: str | Iterable[str] = (),
    compress: bool = True,
) -> Any:
    """Keep the results of a function, or the items of a map-style dataset, on disk.

    Preprocessing runs once; from then on its results are read, in any process and on any machine that has the folder.
    The key of an entry is the content of the arguments (tensors, arrays, containers, dataclasses, objects of Python
    classes; of a pathlib.Path also the file's size and time) and the function itself: its source, defaults, the values
    that it closes over, and, as far as its source names them, globals and the functions, classes and modules of the
    program, followed in turn. Of installed packages name and version count. For a dataset its class, its attributes at
    the time of wrapping and the index count. A function is examined at its first call.

    Keys err on the safe side: an edit that changes nothing may cost a miss. Names that code looks up at run time
    (import_module(name), globals()[name], sys.modules, eval) and modules that are passed around as values are refused.
    So are imports by functions without source, such as those that exec() makes. Do not cache functions that draw random
    numbers: they would draw them only once.

    A hit's tensors and arrays are mapped copy-on-write: they are writable, and changes stay in the process. They are
    contiguous and share no memory with each other. No pickle is ever written or read.

    Args:
        fn_or_dataset: A function, or a dataset with `__getitem__` and `__len__`. Left out: a decorator is returned.
        dir: The folder, created if it is missing. Many functions may share it.
        max_size: About the most that all entries in the folder take, in bytes or as "50GiB". The least recently used
            ones are evicted. None: no limit.
        version: Takes the place of source, globals and called functions. Change it whenever the results change.
        ignore: Names of parameters, attributes, closed-over variables and globals that are left out of the key.
        compress: Compress with zstd where that at least halves a tensor and the library is installed
            (`pip install 'memopt[data]'`). Compressed tensors are not mapped.

    Returns:
        The function or dataset, with `.cache`: `.cache.statistics()`, `.cache.clear()`.

    Raises:
        TypeError: A value cannot be part of a key, or a result cannot be kept: anything but tensors, NumPy arrays,
            numbers, str, bytes, and lists, tuples, sets and dicts of these. The error names it.
        ValueError: `max_size` is not a size.

    Warns:
        RuntimeWarning: The folder is full or cannot be written; once, and the run goes on uncached.

    Examples:
        >>> load = memopt.data.cached(load, "cache", max_size="50GiB")
        >>> dataset = memopt.data.cached(ImageFolder(...), "cache")
        >>> @memopt.data.cached(dir="cache", version=2)
        ... def tokenize(text): ...
    """
    if fn_or_dataset is None:
        return functools.partial(
            cached, dir=dir, max_size=max_size, version=version, ignore=ignore, compress=compress
        )
    if dir is None:
        raise TypeError("memopt.data.cached needs dir=, the folder for its entries")
    limit = None if max_size is None else arguments.size(max_size, "max_size")
    if limit == 0:
        raise ValueError("memopt.data.cached: max_size=0 would cache nothing; leave it out for no limit")
    names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    is_dataset = hasattr(fn_or_dataset, "__getitem__") and not isinstance(fn_or_dataset, type)
    if not is_dataset and not callable(fn_or_dataset):
        raise TypeError(
            f"memopt.data.cached: a {type(fn_or_dataset).__qualname__} is neither a function nor a map-style dataset "
            "(__getitem__ and __len__); for a stream, cache the function that makes an item"
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
        self._identity: tuple[bytes, bool] | None = None

    def identity(self) -> tuple[bytes, bool]:
        """The digest of what makes the values, taken once, and whether its code reads docstrings or annotations."""
        if self._identity is None:
            made = self._keyed(
                lambda digest: function_key.add_cached(digest, self.made_by, self.version, self.name)
            )
            self._identity = made.digest(), made.introspected
        return self._identity

    def key(self, arguments: Any, path: str) -> str:
        made_by, introspected = self.identity()

        def write(digest: KeyDigest) -> None:
            digest.data("made by", made_by)
            digest.add(arguments, path)

        return self._keyed(write, introspected).digest().hex()

    def _keyed(self, write: Callable[[KeyDigest], None], introspected: bool = False) -> KeyDigest:
        try:
            return keyed(write, self.ignore, versioned=self.version is not None, introspected=introspected)
        except Unkeyable as error:
            raise _explained(error) from None

    def value(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the entry's value; if there is none, make and keep it."""
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
                cache_folder.release_lease(lease)
        return value

    def statistics(self) -> CacheStatistics:
        """Count hits, misses, bytes and the rest since this object was made, those of loaders' workers included."""
        return self.folder.counters.total()

    def clear(self) -> int:
        """Remove all entries in the folder, other functions' too, and return their number."""
        return self.folder.clear()

    def __repr__(self) -> str:
        limit = "" if self.folder.max_size is None else f", at most {_C.format_size(self.folder.max_size)}"
        return f"{self.name} kept in {self.folder.folder}{limit}; {self.statistics()}"

    def _repr_html_(self) -> str:
        title = f"<b>{html.escape(self.name)}</b> kept in {html.escape(self.folder.folder)}"
        return f"{title}{self.statistics()._repr_html_()}"


def _explained(error: Unkeyable) -> TypeError:
    return TypeError(
        f"memopt.data.cached: {error}; leave it out of the key with ignore=(name,) if the result does not depend on "
        "it, or, if it is a global or a called function, give version="
    )


class CachedFunction:
    """A function whose results are kept. Made by memopt.data.cached."""

    def __init__(self, function: Any, cache: Cache) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.cache = cache
        self._signature = function_key.signature_of(function)
        function_names.read_ahead()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self.cache.key(self._named(args, kwargs), f"the arguments of {self.cache.name}")
        return self.cache.value(key, lambda: self.__wrapped__(*args, **kwargs))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments by parameter, defaults included: f(1), f(x=1) and, if y=2 is the default, f(1, 2) are
        equal."""
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)  # a TypeError here is the call's own
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name not in self.cache.ignore}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method: the object on which it is called is an argument, keyed by its content."""
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
