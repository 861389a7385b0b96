"""The layout of a safetensors file: 8 bytes with the header's length, a JSON header, the tensors' bytes end to end
(https://github.com/huggingface/safetensors#format).

It is read and written here rather than by the library safetensors: rows cannot be streamed into that; it maps a file as
memory promised, so that Linux refuses one larger than the machine's memory; and its slices read single rows several
times slower than a mapping. Entries of memopt.data.cached, which needs no such library, are of this format, too. The
tests hold the two against each other in both directions."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
FROM_TORCH = {f"torch.{name}": code for code, name in TORCH.items()}
METADATA = "__metadata__"
"""The header's entry that is no tensor."""
LONGEST_HEADER = 100_000_000
"""The library's limit."""


class Malformed(ValueError):
    """A file that does not match its header, or no longer does."""


@dataclass(frozen=True)
class Extent:
    """The place of a tensor: `begin` is counted from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def header_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    align: int = 8,
    length: int = 0,
) -> bytes:
    """The length and the header of a file whose tensors, dtype and shape by name, follow in this order. Padded with
    spaces to a multiple of `align`, or to `length` in all."""
    if METADATA in tensors:
        raise ValueError(f"no tensor can be called {METADATA!r}: the format reserves it")
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    whole = length or -(-(8 + len(text)) // align) * align
    if 8 + len(text) > whole:
        raise ValueError(f"a header of {8 + len(text)} bytes does not fit in the {whole} reserved for it")
    return struct.pack("<Q", whole - 8) + text + b" " * (whole - 8 - len(text))


def header_length(start: bytes | memoryview, file_size: int) -> int:
    """Bytes of the length and the header together, by the first 8 of the file."""
    if len(start) < 8:
        raise Malformed(f"{file_size} bytes are too few for a safetensors file")
    length = struct.unpack("<Q", start[:8])[0]
    if length > LONGEST_HEADER or 8 + length > file_size:
        raise Malformed(
            f"its header would take {length} bytes of {file_size}: truncated, or not a safetensors file"
        )
    return int(8 + length)


def parse(header: bytes | memoryview, file_size: int) -> tuple[dict[str, Extent], dict[str, str]]:
    """(tensors, metadata) of a header, length and all. Malformed unless the tensors fill the rest of the file without
    gap or overlap, as the format has it."""
    try:
        entries = json.loads(bytes(header[8:]))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise Malformed("its header is not an object of tensors")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise Malformed(f"its {METADATA} is not a dict of text by name")
    start, found = len(header), {}
    for name, entry in entries.items():
        found[name] = _extent(name, entry, start)
    end = start
    for name, extent in sorted(found.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if extent.begin != end:
            raise Malformed(f"tensor {name!r} begins at byte {extent.begin} where {end} was expected")
        end += extent.nbytes
    if end != file_size:
        raise Malformed(
            f"the header describes {end} bytes, the file has {file_size}: it was truncated or damaged"
        )
    return found, metadata


def _extent(name: str, entry: object, start: int) -> Extent:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise Malformed(f"tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    whole = [*(shape if isinstance(shape, list) else [None])]
    whole += offsets if isinstance(offsets, list) and len(offsets) == 2 else [None]
    if any(type(number) is not int or number < 0 for number in whole):
        raise Malformed(f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if type(dtype) is not str or dtype not in BYTES:
        raise Malformed(f"tensor {name!r} is of dtype {dtype!r}, which is not one of {', '.join(BYTES)}")
    nbytes = BYTES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != nbytes:
        raise Malformed(f"tensor {name!r} of {nbytes} bytes is stated to take {offsets[1] - offsets[0]}")
    return Extent(dtype, tuple(shape), start + offsets[0], nbytes)
