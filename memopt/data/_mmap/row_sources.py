"""Sources of an MmapDataset's rows: files, and tensors that somebody else has mapped."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from memopt.data._mmap.mapped_file import File, Part, memmap_part, naming, npy_part, safetensors_parts
from memopt.data._mmap.mapped_writer import PADDING
from memopt.data._mmap.safetensors_layout import Malformed

Chunks = list[Any]
"""The parts of one field, one after the other: each a Part, or a tensor that is there already."""


def from_path(path: str) -> tuple[dict[str, Chunks], str]:
    """(fields, the form of a row: "dict", "tuple" or "single") of a file."""
    path = os.path.abspath(path)
    with naming(path):
        return _from_file(path)


def _from_file(path: str) -> tuple[dict[str, Chunks], str]:
    ending = os.path.splitext(path)[1]
    if ending == ".npy":
        return {"0": [npy_part(path)]}, "single"
    if ending in (".arrow", ".feather"):
        return _from_table(_arrow_file(path)), "dict"
    parts, metadata = safetensors_parts(path)
    parts.pop(PADDING, None)
    form = metadata.get("memopt.rows", "dict")
    names = list(parts)
    if form in ("tuple", "single"):
        if {*parts} != {str(number) for number in range(len(parts))} or (
            form == "single" and len(parts) != 1
        ):
            raise Malformed(f"{path}: its fields {', '.join(parts)} are not those of rows that are a {form}")
        names.sort(key=int)
    elif form != "dict":
        raise Malformed(f"{path}: its rows are said to be a {form!r}: dict, tuple and single are known")
    return {name: [parts[name]] for name in names}, form


def from_source(source: Any) -> tuple[dict[str, Chunks], str]:
    """As from_path, of a dict or tuple of sources, an Arrow table, or one source."""
    if isinstance(source, Mapping):
        chunks = {str(name): _chunks(one, f"field {name!r}") for name, one in source.items()}
        if len(chunks) < len(source):
            raise ValueError("memopt.data.MmapDataset: two fields have one name: names are made texts")
        return chunks, "dict"
    if isinstance(source, tuple):
        return {str(at): _chunks(one, f"field {at}") for at, one in enumerate(source)}, "tuple"
    if hasattr(source, "column_names") and hasattr(source, "column"):
        return _from_table(source), "dict"
    return {"0": _chunks(source, "the source")}, "single"


def _chunks(source: Any, called: str) -> Chunks:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(source, torch.Tensor):
        if source.device.type != "cpu" or source.dim() == 0:
            raise ValueError(
                f"memopt.data.MmapDataset: {called} is on {source.device}, of shape {tuple(source.shape)};"
                " rows need a CPU tensor of one dimension or more"
            )
        return [_part_of_tensor(source)]
    if numpy is not None and isinstance(source, numpy.ndarray):
        if source.ndim == 0:
            raise ValueError(f"memopt.data.MmapDataset: {called} has no dimension, and so no rows")
        if isinstance(source, numpy.memmap) and source.filename is not None:
            return [memmap_part(source)]
        return [_without_warning(source)]
    if hasattr(source, "chunks") or hasattr(source, "null_count"):
        chunks = source.chunks if hasattr(source, "chunks") else [source]
        return [_arrow_tensor(one, called) for one in chunks if len(one)] or [_arrow_tensor(source, called)]
    if isinstance(source, str | os.PathLike):
        fields, form = from_path(os.fspath(source))
        if form != "single":
            raise ValueError(f"memopt.data.MmapDataset: {called} is a file of several fields, {source}")
        return fields["0"]
    kind = type(source)
    raise TypeError(
        f"memopt.data.MmapDataset: {called} is a {kind.__module__}.{kind.__qualname__}; give a path, a tensor "
        "(torch.from_file), a numpy.memmap, an Arrow array or table, or a dict or tuple of these"
    )


def _part_of_tensor(source: Any) -> Any:
    """A tensor of torch.from_file(shared=True) knows its file; any other is used as it is."""
    name = source.untyped_storage().filename
    if name is None or not source.is_contiguous():
        return source
    begin = source.storage_offset() * source.element_size()
    dtype = str(source.dtype).removeprefix("torch.")
    path = os.path.abspath(name)
    return Part(File.at(path), dtype, tuple(source.shape), begin)


def _arrow_file(path: str) -> Any:
    import pyarrow

    mapped = pyarrow.memory_map(path)
    try:
        table = pyarrow.ipc.open_file(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        table = pyarrow.ipc.open_stream(mapped).read_all()
    # Arrow believes what a file says of lengths and offsets: wrong ones end the process, or read elsewhere.
    table.validate(full=True)
    return table


def _from_table(table: Any) -> dict[str, Chunks]:
    return {name: _chunks(table.column(name), f"column {name!r}") for name in table.column_names}


def _arrow_tensor(array: Any, called: str) -> Any:
    """An Arrow array as a tensor on Arrow's own memory. Lists of a fixed size are a row's further dimensions."""
    shape: list[int] = []
    if hasattr(array, "chunks"):
        array = array.combine_chunks()
    if hasattr(array, "storage"):  # an extension, as FixedShapeTensorArray
        shape, array = [*getattr(array.type, "shape", ())], array.storage
    sizes = []
    while hasattr(array.type, "list_size") and array.type.list_size > 0:
        if array.null_count:
            break
        sizes.append(array.type.list_size)
        array = array.flatten()
    if array.null_count:
        raise ValueError(
            f"memopt.data.MmapDataset: {called} has {array.null_count} nulls, which no tensor has: fill them "
            "(pyarrow.compute.fill_null) and write the file anew"
        )
    try:
        tensor = _without_warning(array.to_numpy(zero_copy_only=True))
    except (ValueError, TypeError) as error:
        raise TypeError(
            f"memopt.data.MmapDataset: {called} of Arrow type {array.type} cannot be read in place ({error}); "
            "store fixed-size numbers (booleans as uint8)"
        ) from None
    return tensor.reshape(-1, *(shape or sizes))


def _without_warning(array: Any) -> Any:
    """torch's view of an array that may be read-only: its rows are handed out as copies, so that none is written to."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def names_of(fields: str | Sequence[str]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)
