"""Zstandard, by Python's own compression.zstd (3.14 and later) or the package `zstandard`. Where neither is there,
nothing is compressed, and what was compressed elsewhere is not read."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

LEVEL = 3
"""The library's own default: a few times the speed of a disk, most of the ratio."""
SAMPLE = 1 << 16
"""Bytes of the trial that says whether compressing pays."""
PAYS = 0.5
"""It pays where at most this share is left: a raw value is mapped as it lies, a compressed one is unpacked into memory
at each reading, for which half the disk has to be won."""


@functools.cache
def library() -> Any:
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


@functools.cache
def _compress() -> Callable[[Any], bytes]:
    zstd = library()
    if hasattr(zstd, "ZstdCompressor") and zstd.__name__ == "zstandard":
        return lambda raw: zstd.ZstdCompressor(level=LEVEL).compress(raw)  # type: ignore[no-any-return]
    return lambda raw: zstd.compress(raw, level=LEVEL)  # type: ignore[no-any-return]


def compressed(raw: memoryview) -> bytes | None:
    """The bytes compressed, or None where that does not pay: by a trial on a piece of it, then by the whole."""
    if library() is None or len(raw) < 4096:
        return None
    middle = max(0, (len(raw) - SAMPLE) // 2)
    trial = raw[middle : middle + SAMPLE]
    if len(_compress()(trial)) > PAYS * len(trial):
        return None
    whole = _compress()(raw) if len(trial) < len(raw) else _compress()(trial)
    return whole if len(whole) <= PAYS * len(raw) else None


def decompressed(packed: memoryview, size: int) -> bytearray:
    """Decompress to exactly `size` bytes; ValueError for anything else."""
    zstd = library()
    try:
        if zstd.__name__ == "zstandard":
            raw = zstd.ZstdDecompressor().decompress(packed, max_output_size=size)
        else:
            unpacking = zstd.ZstdDecompressor()
            raw = unpacking.decompress(packed, max_length=size + 1)
    except zstd.ZstdError as error:
        raise ValueError(f"not what zstd wrote: {error}") from error
    if len(raw) != size:
        raise ValueError(f"zstd gave {len(raw)} bytes of {size}")
    return bytearray(raw)
