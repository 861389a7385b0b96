"""memopt.data.SharedList, SharedStrings and SharedDict: containers in memory that worker processes share.

The extension's classes (_C.SharedItems, _C.SharedMapping) read the memory; here is what goes into it, and how it goes
to other processes: to those that multiprocessing starts or talks to its descriptor, whatever its size; anywhere else (a
file, a checkpoint) its content. NumPy and torch are imported only where an object of theirs is met.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import islice
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from memopt import _C
from memopt._runtime.host_memory import available
from memopt.data import _array_bytes
from memopt.data._array_bytes import bytes_of


def build(kind: int, name: str, items: Iterable[Any], *, pickle: bool) -> _C.SharedMemory:
    free = available()
    limit = 0 if free is None else max(1, free)  # 0 says that there is none
    return _C.shared_build(kind, name, items, encode_or_pickle if pickle else encode, limit)


class SharedContainer:
    """Beside the type of the extension's that reads the memory (`_reader`), in whose instances nothing is added."""

    __slots__ = ()
    _reader: type[_C.SharedItems] | type[_C.SharedMapping]

    if TYPE_CHECKING:

        @property
        def _memory(self) -> _C.SharedMemory: ...
        def __len__(self) -> int: ...

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        ForkingPickler.register(cls, _by_descriptor)  # instances of exactly this class

    @classmethod
    def _of(cls, memory: _C.SharedMemory) -> Self:
        made: Self = cls._reader.__new__(cls, memory, decode)  # type: ignore[type-var]
        return made

    def _whole(self) -> Self:
        """Return the same content in a memory that holds nothing else."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory that contains this object, which may be a slice."""
        return len(self._memory)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nobody can change it

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_content, (type(self), bytes(self._whole()._memory))


def _by_descriptor(shared: Any) -> tuple[Any, ...]:
    # The memory is an object of its own in the pickle: what is in one goes in one.
    return _from_memory, (type(shared), shared._memory, getattr(shared, "_range", None))


def _memory_by_descriptor(memory: _C.SharedMemory) -> tuple[Any, ...]:
    return _received, (DupFd(memory.fileno()),)


def _received(handle: Any) -> _C.SharedMemory:
    return _C.SharedMemory(handle.detach())


def _from_content(kind: type[SharedContainer], content: bytes) -> Any:
    return kind._of(_C.shared_copy(content))


def _from_memory(
    kind: type[SharedContainer], memory: _C.SharedMemory, part: tuple[int, int, int] | None
) -> Any:
    whole: Any = kind._of(memory)
    if part is None or part == (0, 1, len(whole)):
        return whole
    start, step, length = part
    stop = start + step * length
    return whole[start : stop if stop >= 0 else None : step] if length else whole[:0]


ForkingPickler.register(_C.SharedMemory, _memory_by_descriptor)


# ---- sequences -------------------------------------------------------------------------------------------------------


T = TypeVar("T", covariant=True)
_SHOWN = 3  # items or entries of a repr


class SharedSequence(SharedContainer, _C.SharedItems, Sequence[T]):
    """A sequence in shared memory; its classes say of what."""

    __slots__ = ()
    _reader = _C.SharedItems
    _kind: int  # of the memory: 1 strings, 2 values

    def _whole(self) -> Self:
        if self._range == _C.SharedItems(self._memory, decode)._range:
            return self
        return self._of(build(self._kind, type(self).__name__, self, pickle=True))

    if TYPE_CHECKING:  # C's own are faster than a call of Python's

        def __iter__(self) -> Iterator[T]: ...
        @overload
        def __getitem__(self, index: int, /) -> T: ...
        @overload
        def __getitem__(self, index: slice, /) -> Self: ...
        def __getitem__(self, index: Any, /) -> Any: ...

    def __reversed__(self) -> Iterator[T]:
        return iter(self[::-1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | SharedSequence):
            return NotImplemented
        return len(self) == len(other) and all(a is b or a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other] if isinstance(other, list | SharedSequence) else NotImplemented

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            count, size = len(self), _C.format_size(self.nbytes)
        except ValueError:
            return f"{name}(closed)"
        shown = [repr(item) for item in islice(self, _SHOWN)] + ["…"] * (count > _SHOWN)
        return f"{name}([{', '.join(shown)}], {count} item{'s' * (count != 1)}, {size})"


class SharedList(SharedSequence[T]):
    """A list in memory that worker processes share.

    Reading a plain list's objects writes to their reference counts, and so copies them, page by page, into each worker
    process. Here they are bytes, and each read creates the item anew: two reads of an item return equal objects, not
    the same one, and a change of one does not change the list. It is read like a list (index, slice, iteration, `in`,
    `index()`, `count()`, `==`); a slice is a view.

    An item is None, a bool, int, float, complex, str, bytes, bytearray, or a tuple, list, dict, set or frozenset of
    such, to a depth of 200; a NumPy array or scalar; a dense torch tensor on the CPU. Arrays and tensors are views,
    aligned to 64 bytes, which keep the memory alive. Arrays are read-only; a tensor can be written to, but the change
    is visible only in the process that made it. For str alone SharedStrings is smaller and faster.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it is sent as a
    file descriptor, at no cost; pickled in any other way it carries its content. The memory is unnamed: it is freed
    with the last process that uses it, however that process ends. It does not count in /dev/shm, but in a container's
    memory. Accept one only from processes from which you would accept a pickle, because its content may contain
    pickles.

    Args:
        items: Any iterable. It is read once, front to back, so only one item of a generator exists at a time. Building
            takes 3 MiB beside the result and the current item.
        pickle: Keep other objects as pickles, which each read loads.

    Raises:
        TypeError: An item cannot be shared. The error names the item and the place in it.
        ValueError: An item is nested too deeply, or contains itself.
        OSError: The memory is not available.

    Examples:
        >>> dataset.samples = memopt.data.SharedList(dataset.samples)
    """

    __slots__ = ()
    _kind = 2

    def __new__(cls, items: Iterable[T] = (), /, *, pickle: bool = False) -> Self:
        return cls._of(build(cls._kind, cls.__name__, items, pickle=pickle))


class SharedStrings(SharedSequence[str]):
    """A list of str in memory that worker processes share.

    A str of a plain list has a reference count, and a worker that reads the str writes to the count: the list is copied
    page by page into each worker. Here a str takes its UTF-8 bytes and 4 (beyond 4 GiB: 8) bytes for its offset; each
    read creates it anew. It is read like a list (index, slice, iteration, `in`, `index()`, `count()`, `==`); a slice is
    a view. It cannot be changed. Surrogates are kept; an instance of a subclass of str comes back as a str.

    To processes that multiprocessing starts (DataLoader's workers under fork, spawn and forkserver) it is sent as a
    file descriptor, at no cost; pickled in any other way it carries its content. The memory is unnamed: it is freed
    with the last process that uses it, however that process ends. It does not count in /dev/shm, but in a container's
    memory.

    Args:
        strings: Any iterable. It is read once, front to back, so a generator's strings never exist all at once.
            Building takes 3 MiB beside the result.

    Raises:
        TypeError: An item is not a str. The error names it.
        OSError: The memory is not available.

    Examples:
        >>> dataset.paths = memopt.data.SharedStrings(dataset.paths)
    """

    __slots__ = ()
    _kind = 1

    def __new__(cls, strings: Iterable[str] = (), /) -> Self:
        return cls._of(build(cls._kind, cls.__name__, strings, pickle=False))


# ---- mappings --------------------------------------------------------------------------------------------------------


K = TypeVar("K")
V = TypeVar("V", covariant=True)


class SharedDict(SharedContainer, _C.SharedMapping, Mapping[K, V]):
    """A dict in memory that worker processes share.

    It is read like a dict (`d[key]`, `get()`, `in`, `keys()`, `values()`, `items()`, iteration in insertion order,
    `==`). It cannot be changed. Each read creates the value anew. It is sent to other processes like a SharedList. An
    entry costs its own bytes, 8 (beyond 4 GiB: 16) for its offsets and 11 to 21 in the index.

    Keys are str, int, float, bytes, bool, None and tuples of them, but not nan. They are looked up as in a dict, where
    1, 1.0 and True are equal. Values have the types that items of a SharedList have.

    Args:
        items: A mapping, or an iterable of pairs, read once, entry by entry. Of equal keys the first one is kept, with
            the last value. Building takes 3 MiB beside the result.
        pickle: Keep other values as pickles, which each read loads.

    Raises:
        TypeError: A key or value cannot be shared, or a key that is looked up is not hashable. The error names the
            place.
        ValueError: A value is nested too deeply, or contains itself.
        KeyError: A key that is looked up is not there.
        OSError: The memory is not available.

    Examples:
        >>> dataset.boxes = memopt.data.SharedDict(dataset.boxes)
    """

    __slots__ = ()
    _reader = _C.SharedMapping

    def __new__(cls, items: Mapping[K, V] | Iterable[tuple[K, V]] = (), /, *, pickle: bool = False) -> Self:
        pairs = items.items() if isinstance(items, Mapping) else items
        return cls._of(build(3, cls.__name__, pairs, pickle=pickle))

    if TYPE_CHECKING:  # C's own are faster than a call of Python's

        def __getitem__(self, key: K, /) -> V: ...
        @overload
        def get(self, key: object, default: None = None, /) -> V | None: ...
        @overload
        def get(self, key: object, default: Any, /) -> Any: ...
        def get(self, key: object, default: Any = None, /) -> Any: ...

    def __iter__(self) -> Iterator[K]:
        return map(self._key_at, range(len(self)))

    def __reversed__(self) -> Iterator[K]:
        return map(self._key_at, reversed(range(len(self))))

    def keys(self) -> KeysView[K]:
        return KeysView(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict | SharedDict):
            return NotImplemented
        missing = object()
        found = ((value, other.get(key, missing)) for key, value in self.items())
        return len(self) == len(other) and all(a is b or a == b for a, b in found)

    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            count, size = len(self), _C.format_size(self.nbytes)
        except ValueError:
            return f"{name}(closed)"
        shown = [f"{key!r}: {value!r}" for key, value in islice(self.items(), _SHOWN)] + ["…"] * (
            count > _SHOWN
        )
        return f"{name}({{{', '.join(shown)}}}, {count} entr{'y' if count == 1 else 'ies'}, {size})"


class _Items(ItemsView[K, V]):
    """An items view that reads entry by entry: nothing is looked up."""

    __slots__ = ()
    _mapping: SharedDict[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return map(self._mapping._item_at, range(len(self._mapping)))

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return map(self._mapping._item_at, reversed(range(len(self._mapping))))


class _Values(ValuesView[V]):
    __slots__ = ()
    _mapping: SharedDict[Any, V]

    def __iter__(self) -> Iterator[V]:
        return map(self._mapping._value_at, range(len(self._mapping)))

    def __reversed__(self) -> Iterator[V]:
        return map(self._mapping._value_at, reversed(range(len(self._mapping))))


# ---- arrays, tensors and pickles as bytes ----------------------------------------------------------------------------


_ARRAY, _SCALAR, _TENSOR, _PICKLE = range(4)
_TAKEN = (
    "None, bool, int, float, complex, str, bytes, tuple, list, dict, set, NumPy arrays and torch tensors "
    "can be shared"
)

Leaf = tuple[int, Any, Any]  # kind, description, buffer


def encode(value: object) -> Leaf | str:
    """Return the encoded leaf, or what is wrong with it."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        if type(value) in (numpy.ndarray, numpy.memmap):
            return _of_array(value)
        if isinstance(value, numpy.generic):
            return _of_scalar(value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value)
    return f"of type {type(value).__qualname__}: {_TAKEN}; pickle=True stores other types as pickles"


def encode_or_pickle(value: object) -> Leaf | str:
    """Return the same, with values that cannot be views of shared memory as pickles."""
    found = encode(value)
    return (_PICKLE, None, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) if isinstance(found, str) else found


def decode(kind: int, description: Any, memory: _C.SharedMemory, begin: int, length: int) -> object:
    """Return the value of a leaf; an array or tensor keeps the memory alive. Raises memopt.Error for damaged memory."""
    if kind == _PICKLE:
        return pickle.loads(memoryview(memory)[begin : begin + length])
    try:
        if kind == _TENSOR:
            return _tensor(description, memory, begin, length)
        if kind in (_ARRAY, _SCALAR):
            array = _array(description, memory, begin, length)
            return array[()].copy() if kind == _SCALAR else array
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RuntimeError,
        OverflowError,
        SyntaxError,
    ) as error:
        raise _C.Error(f"this shared container's memory is damaged: {error}") from error
    raise _C.Error(f"this shared container's memory is damaged: it has a leaf of the unknown kind {kind}")


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def _of_array(array: Any) -> Leaf | str:
    import numpy as np

    if array.dtype.hasobject:
        return (
            f"an array of {array.dtype}: each element is a Python object; pickle=True stores it as a pickle"
        )
    written = _array_bytes.dtype_description(array.dtype)
    if written is None:
        return f"an array of {array.dtype}: NumPy cannot name this type; pickle=True stores it as a pickle"
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    plain = np.asarray(array, order="F" if fortran else "C")
    flat = plain.reshape(-1, order="F" if fortran else "C")  # a view
    content = flat.view(np.uint8).data if array.nbytes else b""
    return _ARRAY, (written, array.shape, fortran), content


def _of_scalar(value: Any) -> Leaf | str:
    import numpy as np

    array = np.asarray(value)
    if type(value) is not array.dtype.type or array[()].__class__ is not type(value):
        return f"of type {type(value).__qualname__}: {_TAKEN}; pickle=True stores other types as pickles"
    found = _of_array(array)
    return found if isinstance(found, str) else (_SCALAR, found[1], found[2])


def _array(description: Any, memory: _C.SharedMemory, begin: int, length: int) -> Any:
    import numpy as np

    written, shape, fortran = description
    dtype = _array_bytes.dtype_of(written)
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype}")
    array = np.ndarray(shape, dtype, memory, begin, order="F" if fortran else "C")
    if array.nbytes != length:
        raise ValueError(f"an array of {array.nbytes} bytes in {length}")
    return array


# ---- torch -----------------------------------------------------------------------------------------------------------


def _of_tensor(tensor: Any) -> Leaf | str:
    import torch

    if type(tensor) is not torch.Tensor:
        return f"of type {type(tensor).__qualname__}: only plain tensors can be shared: give its .detach()"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}: share its .cpu()"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"a tensor of layout {tensor.layout}, or quantized: share its .to_dense() or .dequantize()"
    if tensor.requires_grad:
        return "a tensor that requires grad: share its .detach()"
    return _TENSOR, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), bytes_of(tensor)


def _tensor(description: Any, memory: _C.SharedMemory, begin: int, length: int) -> Any:
    import torch

    name, shape = description
    dtype = _dtypes()[name]
    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize != length or count < 0:
        raise ValueError(f"a tensor of shape {shape} in {length} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype)
    # torch knows no read-only tensors: what is written to one stays in this process.
    return torch.frombuffer(memory.privately(), dtype=dtype, count=count, offset=begin).view(shape)


@functools.cache
def _dtypes() -> dict[str, Any]:
    import torch

    return {
        name: value
        for name in dir(torch)
        if isinstance(value := getattr(torch, name), torch.dtype) and str(value) == f"torch.{name}"
    }
