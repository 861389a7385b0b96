"""One entry of a cache as a file: a safetensors file, whose tensors are the value's tensors, arrays and bytes, and
whose metadata has the value's structure as JSON, the entry's key and a checksum of all.

Nothing in it is code, and reading it runs none. Values come back mapped copy-on-write: a change to one stays in the
process that made it and never reaches the file.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

from memopt import _C
from memopt.data import _array_bytes
from memopt.data._array_bytes import bytes_of
from memopt.data._mmap import safetensors_layout

FORMAT = "1"
MAPPED_FROM = 1 << 16
"""Bytes of an entry that is mapped; a smaller one is read, which takes no longer and none of the 65530 mappings that
Linux grants a process by default."""
_CRC_AT = 8 + len('{"__metadata__":{"crc32":"')
_CRC_END = _CRC_AT + 8
_LONGEST_INT = 10_000
"""Bits: Python reads no more than 4300 decimal digits."""


class Unstorable(TypeError):
    """A result that a cache cannot keep: what it is, where in the result, and what to return instead."""


class Damaged(ValueError):
    """An entry that differs from what was written."""


class Unreadable(Exception):
    """A complete entry that this process cannot read, because it lacks a library."""


class _Parts:
    """The tensors of an entry that is being written, by name."""

    def __init__(self, compress: bool) -> None:
        self.compress = compress
        self.raw: dict[str, memoryview | bytes] = {}
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.wide: set[str] = set()  # of 16 bytes an element, for which safetensors has no dtype

    def add(self, raw: memoryview, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Store the bytes and return their description for the structure.

        A dtype that safetensors lacks is stored as bytes."""
        name = str(len(self.raw))
        packed = compressed(raw) if self.compress else None
        if packed is not None:
            self.raw[name], self.kinds[name] = packed, ("U8", (len(packed),))
            return {"at": name, "zstd": len(raw)}
        self.raw[name] = raw
        known = dtype in safetensors_layout.BYTES
        if dtype == "complex128":
            self.wide.add(name)
        self.kinds[name] = (dtype, shape) if known else ("U8", (len(raw),))
        return {"at": name}


def encode(value: Any, key: str, compress: bool) -> list[bytes | memoryview]:
    """Return the file's bytes, in pieces. Unstorable names what cannot be kept. compress: by zstd, where that pays."""
    parts = _Parts(compress)
    try:
        structure = json.dumps(_write(value, parts, "the result"), separators=(",", ":"))
    except RecursionError:
        raise Unstorable("memopt.data.cached: the result contains itself, or is nested too deeply") from None
    # A view of some dtype needs its begin at a multiple of the dtype's size: the widest come first.
    order = sorted(
        parts.raw,
        key=lambda name: -(16 if name in parts.wide else safetensors_layout.BYTES[parts.kinds[name][0]]),
    )
    header = bytearray(
        safetensors_layout.header_bytes(
            {name: parts.kinds[name] for name in order},
            {"crc32": "0" * 8, "memopt": FORMAT, "key": key, "value": structure},
            align=64,
        )
    )
    pieces = [parts.raw[name] for name in order]
    header[_CRC_AT:_CRC_END] = b"%08x" % _checksum(header, *pieces)
    return [bytes(header), *pieces]


def _checksum(start: Any, *rest: Any) -> int:
    """Return the CRC-32 of everything except its own place."""
    view = memoryview(start)
    found = zlib.crc32(view[_CRC_END:], zlib.crc32(view[:_CRC_AT]))
    for piece in rest:
        found = zlib.crc32(piece, found)
    return found


def _write(value: Any, parts: _Parts, path: str) -> Any:
    """Return the structure: JSON's own types for None, bool, int, float and str, [kind, …] for the rest."""
    kind = type(value)
    if kind is int and value.bit_length() > _LONGEST_INT:
        return ["int", hex(value)]
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *(_write(one, parts, f"{path}[{n}]") for n, one in enumerate(value))]
    if kind is dict:
        pairs = (
            [_write(name, parts, f"a key of {path}"), _write(one, parts, f"{path}[{name!r}]")]
            for name, one in value.items()
        )
        return ["dict", *pairs]
    if kind in (bytes, bytearray):
        return [kind.__name__, parts.add(memoryview(value), "U8", (len(value),))]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return _write_tensor(value, parts, path)
    if kind.__module__ == "torch" and kind.__name__ == "Size":
        return ["size", *value]
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)):
        return _write_array(value, parts, path, numpy)
    raise Unstorable(
        f"memopt.data.cached: {path} is a {kind.__module__}.{kind.__qualname__}, which the cache cannot keep; return "
        "tensors, NumPy arrays, numbers, str, bytes, and lists, tuples, sets and dicts of these (an image as "
        "numpy.asarray(image))"
    )


def _write_tensor(value: Any, parts: _Parts, path: str) -> Any:
    torch = sys.modules["torch"]
    dtype = safetensors_layout.FROM_TORCH.get(str(value.dtype))
    remedy = None
    if value.layout is not torch.strided or value.is_quantized:
        remedy = f"is {value.layout}; return value.to_dense()"
    elif value.device.type != "cpu":
        remedy = f"is on {value.device}; return value.cpu()"
    elif value.requires_grad:
        remedy = "requires grad, but a graph cannot be cached; return value.detach()"
    elif dtype is None and value.dtype is not torch.complex128:
        remedy = f"is of {value.dtype}, which the file format does not have"
    if remedy:
        raise Unstorable(f"memopt.data.cached: {path} {remedy}")
    name = str(value.dtype).removeprefix("torch.")
    return ["tensor", parts.add(bytes_of(value), dtype or name, tuple(value.shape)), name, list(value.shape)]


def _write_array(value: Any, parts: _Parts, path: str, numpy: Any) -> Any:
    described = _array_bytes.dtype_description(value.dtype)
    if described is None:
        why = "objects cannot be kept" if value.dtype.hasobject else "NumPy has no description of this dtype"
        raise Unstorable(f"memopt.data.cached: {path} is an array of {value.dtype}: {why}")
    raw = memoryview(b"")
    if value.size and value.dtype.itemsize:  # NumPy makes "" 4 bytes long where it copies
        raw = memoryview(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
    known = _FROM_NUMPY.get(value.dtype.str, "")
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    return [kind, parts.add(raw, known, tuple(value.shape)), described, list(value.shape)]


_FROM_NUMPY = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    **{f"<{kind}{size}": f"{kind.upper()}{size * 8}" for kind in "uif" for size in (2, 4, 8)},
    "<c8": "C64",
}


# ---- reading ----------------------------------------------------------------------------------------------------


def load(descriptor: int, mapped: bool) -> Any:
    """Return a file's content: a copy-on-write mapping, or a bytearray if it is small, or cannot or must not be mapped.

    The mapping keeps no descriptor, as one of Python's would before 3.13: there may be more hits than a process may
    open files."""
    size = os.fstat(descriptor).st_size
    if mapped and size >= MAPPED_FROM:
        try:
            return _C.PrivateMapping(descriptor, size)
        except OSError:
            pass  # no mapping is left, or the file system has none
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], done)
        if count == 0:
            raise Damaged(f"it ends after {done} of {size} bytes")
        done += count
    return content


def decode(content: Any, key: str) -> Any:
    """Return the value of an entry's bytes, with tensors and arrays as views into them.

    Raises Damaged unless they are bit for bit what was written under this key."""
    view = memoryview(content)
    try:
        start = safetensors_layout.header_length(view, len(view))
        if start < _CRC_END or bytes(view[_CRC_AT:_CRC_END]) != b"%08x" % _checksum(view):
            raise Damaged("its checksum differs")
        extents, metadata = safetensors_layout.parse(view[:start], len(view))
        if metadata.get("key") != key:
            raise Damaged(f"it was written as {metadata.get('key')}")
        if metadata.get("memopt") != FORMAT:
            raise Unreadable(f"its format is {metadata.get('memopt')}, but this memopt reads {FORMAT}")
        return _read(json.loads(metadata["value"]), content, extents)
    except (LookupError, TypeError, AttributeError, ValueError, SyntaxError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"memopt did not write it: {error!r}") from error


def _read(written: Any, content: Any, extents: dict[str, safetensors_layout.Extent]) -> Any:
    if not isinstance(written, list):
        return written
    kind, rest = written[0], written[1:]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_read(one, content, extents) for one in rest)
    if kind == "dict":
        return {_read(name, content, extents): _read(one, content, extents) for name, one in rest}
    if kind == "int":
        return int(rest[0], 16)
    if kind == "complex":
        return complex(*rest)
    if kind == "size":
        import torch

        return torch.Size(rest)
    buffer, begin, nbytes = _bytes_at(rest[0], content, extents)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](memoryview(buffer)[begin : begin + nbytes])
    return _READERS[kind](buffer, begin, nbytes, *rest[1:])


_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _bytes_at(
    part: dict[str, Any], content: Any, extents: dict[str, safetensors_layout.Extent]
) -> tuple[Any, int, int]:
    """Return (a writable buffer, the offset in it, the number of bytes)."""
    extent = extents[part["at"]]
    if "zstd" not in part:
        return content, extent.begin, extent.nbytes
    if zstandard_library() is None:
        raise Unreadable("it is compressed by zstd: pip install 'memopt[data]' (or zstandard) to read it")
    packed = memoryview(content)[extent.begin : extent.begin + extent.nbytes]
    return decompressed(packed, part["zstd"]), 0, part["zstd"]


def _read_tensor(buffer: Any, begin: int, nbytes: int, name: str, shape: list[int]) -> Any:
    import torch

    dtype = getattr(torch, name)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if count * dtype.itemsize != nbytes:
        raise Damaged(f"{nbytes} bytes are not a {name} of shape {shape}")
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin).reshape(shape)


def _read_array(buffer: Any, begin: int, nbytes: int, described: Any, shape: list[int]) -> Any:
    import numpy

    dtype = _array_bytes.dtype_of(described)
    count = math.prod(shape)
    if count * dtype.itemsize != nbytes:
        raise Damaged(f"{nbytes} bytes are not a {dtype} of shape {shape}")
    if nbytes == 0:
        return numpy.ndarray(shape, dtype)
    return numpy.frombuffer(buffer, dtype=dtype, count=count, offset=begin).reshape(shape)


_READERS: dict[str, Any] = {
    "tensor": _read_tensor,
    "array": _read_array,
    "scalar": lambda *at: _read_array(*at)[()],
}


# ---- Zstandard -------------------------------------------------------------------------------------------------------
# Zstandard, by Python's own compression.zstd (3.14 and later) or the package `zstandard`. Where neither is there,
# nothing is compressed, and what was compressed elsewhere is not read.


LEVEL = 3
"""The library's own default: a few times the speed of a disk, most of the ratio."""
SAMPLE = 1 << 16
"""Bytes of the trial that says whether compressing pays."""
PAYS = 0.5
"""It pays where at most this share is left: a raw value is mapped as it lies, a compressed one is unpacked into memory
at each reading, for which half the disk has to be won."""


@functools.cache
def zstandard_library() -> Any:
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


@functools.cache
def _compress() -> Callable[[Any], bytes]:
    zstd = zstandard_library()
    if hasattr(zstd, "ZstdCompressor") and zstd.__name__ == "zstandard":
        return lambda raw: zstd.ZstdCompressor(level=LEVEL).compress(raw)  # type: ignore[no-any-return]
    return lambda raw: zstd.compress(raw, level=LEVEL)  # type: ignore[no-any-return]


def compressed(raw: memoryview) -> bytes | None:
    """Return the bytes compressed, or None if that does not pay: a piece is tried first, then the whole."""
    if zstandard_library() is None or len(raw) < 4096:
        return None
    middle = max(0, (len(raw) - SAMPLE) // 2)
    trial = raw[middle : middle + SAMPLE]
    if len(_compress()(trial)) > PAYS * len(trial):
        return None
    whole = _compress()(raw) if len(trial) < len(raw) else _compress()(trial)
    return whole if len(whole) <= PAYS * len(raw) else None


def decompressed(packed: memoryview, size: int) -> bytearray:
    """Decompress to exactly `size` bytes; ValueError for anything else."""
    zstd = zstandard_library()
    try:
        if zstd.__name__ == "zstandard":
            raw = zstd.ZstdDecompressor().decompress(packed, max_output_size=size)
        else:
            unpacking = zstd.ZstdDecompressor()
            raw = unpacking.decompress(packed, max_length=size + 1)
    except zstd.ZstdError as error:
        raise ValueError(f"not valid zstd data: {error}") from error
    if len(raw) != size:
        raise ValueError(f"zstd returned {len(raw)} bytes of {size}")
    return bytearray(raw)
