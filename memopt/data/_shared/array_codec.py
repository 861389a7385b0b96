"""Codec of arrays and tensors in shared memory, which are read as views of it, and, where it is asked for, of pickles.

NumPy and torch are imported only where one of theirs is met."""

from __future__ import annotations

import functools
import pickle
import sys
from typing import Any

from memopt import _C
from memopt.data import _array_bytes
from memopt.data._array_bytes import bytes_of

_ARRAY, _SCALAR, _TENSOR, _PICKLE = range(4)
_TAKEN = (
    "None, bool, int, float, complex, str, bytes, tuple, list, dict, set, NumPy arrays and torch tensors "
    "can be shared"
)

Leaf = tuple[int, Any, Any]  # kind, description, buffer


def encode(value: object) -> Leaf | str:
    """A leaf, or what is wrong with it."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        if type(value) in (numpy.ndarray, numpy.memmap):
            return _of_array(value)
        if isinstance(value, numpy.generic):
            return _of_scalar(value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value)
    return f"of type {type(value).__qualname__}: {_TAKEN}; pickle=True keeps others as pickles"


def encode_or_pickle(value: object) -> Leaf | str:
    """The same, and what cannot be a view of shared memory is kept as a pickle."""
    found = encode(value)
    return (_PICKLE, None, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) if isinstance(found, str) else found


def decode(kind: int, description: Any, memory: _C.SharedMemory, begin: int, length: int) -> object:
    """The value of a leaf; an array or tensor keeps the memory alive. Raises memopt.Error where what is there is no
    such value."""
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
    raise _C.Error(f"this shared container's memory is damaged: a leaf of the unknown kind {kind}")


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def _of_array(array: Any) -> Leaf | str:
    import numpy as np

    if array.dtype.hasobject:
        return f"an array of {array.dtype}: each element is a Python object; pickle=True keeps it as a pickle"
    written = _array_bytes.dtype_description(array.dtype)
    if written is None:
        return f"an array of {array.dtype}: NumPy cannot name this type; pickle=True keeps it as a pickle"
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    plain = np.asarray(array, order="F" if fortran else "C")
    flat = plain.reshape(-1, order="F" if fortran else "C")  # a view
    content = flat.view(np.uint8).data if array.nbytes else b""
    return _ARRAY, (written, array.shape, fortran), content


def _of_scalar(value: Any) -> Leaf | str:
    import numpy as np

    array = np.asarray(value)
    if type(value) is not array.dtype.type or array[()].__class__ is not type(value):
        return f"of type {type(value).__qualname__}: {_TAKEN}; pickle=True keeps others as pickles"
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
        return f"of type {type(tensor).__qualname__}: plain tensors can be shared: give its .detach()"
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
