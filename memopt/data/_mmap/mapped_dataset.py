"""memopt.data.MmapDataset: rows of tensors that stay in a file, and come into memory when they are asked for."""

from __future__ import annotations

import bisect
import mmap
import operator
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime.table import ResultTable, paragraphs
from memopt.data._mmap import mapped_file
from memopt.data._mmap.mapped_file import File, Part, memmap_part, naming, npy_part, safetensors_parts
from memopt.data._mmap.mapped_writer import PADDING
from memopt.data._mmap.safetensors_layout import Malformed

if TYPE_CHECKING:
    from torch import Tensor

ADVISED_FROM = 1 << 14
"""Bytes of a row from which the rows of a batch are asked of the disk all at once before the first is copied; the pages
of smaller ones mostly come along with their neighbours'."""


@dataclass(frozen=True)
class MappedBytes:
    """The bytes of memory that a dataset's mappings take."""

    page_cache: int
    """Pages of the file that this process has touched. The kernel shares them among processes and takes them back
    when it wants: they are no leak, though tools count them (RSS, "used")."""
    copied: int
    """Pages that this process wrote to, which are its own."""

    def __str__(self) -> str:
        cache, own = _C.format_size(self.page_cache), _C.format_size(self.copied)
        return f"{cache} of page cache (shared, taken back on demand), {own} of this process's own"


class _Field:
    """One tensor of rows, maybe in several parts."""

    def __init__(self, name: str, chunks: Sequence[Any], mappings: dict[File, mmap.mmap]) -> None:
        self.mapping = [mappings.get(one.file) if isinstance(one, Part) else None for one in chunks]
        self.begins = [one.begin if isinstance(one, Part) else 0 for one in chunks]
        self.tensors = [
            mapped_file.view(one, mapping) if isinstance(one, Part) else one
            for one, mapping in zip(chunks, self.mapping, strict=True)
        ]
        kinds = {(one.dtype, one.shape[1:]) for one in self.tensors}
        if len(kinds) > 1:
            raise ValueError(f"memopt.data.MmapDataset: field {name!r} has parts of different kinds: {kinds}")
        self.dtype, self.row_shape = kinds.pop()
        self.ends = [*accumulate(len(one) for one in self.tensors)]
        self.row_bytes = self.row_shape.numel() * self.dtype.itemsize
        # What was not mapped here may be memory that must not be written: its rows are handed out as copies.
        self.ours = all(isinstance(one, Part) for one in chunks)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def row(self, index: int) -> Tensor:
        at = bisect.bisect_right(self.ends, index)
        row: Tensor = self.tensors[at][index - (self.ends[at - 1] if at else 0)]
        return row if self.ours else row.clone()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return adjacent rows, in one copy."""
        import torch

        pieces = []
        for at, end in enumerate(self.ends):
            begin = self.ends[at - 1] if at else 0
            low, high = max(start, begin), min(stop, end)
            if low < high:
                self._will_need(at, low - begin, high - begin)
                pieces.append(self.tensors[at][low - begin : high - begin])
        if not pieces:
            return torch.empty((0, *self.row_shape), dtype=self.dtype)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()

    def take(self, indices: Tensor) -> Tensor:
        """Return the rows at non-negative indices, in one copy."""
        import torch

        # As integers of the same width: torch selects from those whatever the dtype. There are none of 16 bytes.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        plain = integers.get(self.dtype.itemsize, self.dtype)
        tensors = [one.view(plain) for one in self.tensors]
        if len(tensors) == 1:
            return torch.index_select(tensors[0], 0, indices).view(self.dtype)
        found = torch.empty((len(indices), *self.row_shape), dtype=plain)
        homes = torch.bucketize(indices, torch.tensor(self.ends), right=True)
        for at in homes.unique().tolist():
            here = (homes == at).nonzero().flatten()
            begin = self.ends[at - 1] if at else 0
            found[here] = torch.index_select(tensors[at], 0, indices[here] - begin)
        return found.view(self.dtype)

    def will_need(self, runs: Iterable[tuple[int, int]]) -> None:
        """Prefetch ranges of rows (first, one past the last) in the disk's order, before any is read."""
        if self.row_bytes < ADVISED_FROM or self.mapping[0] is None or len(self.tensors) > 1:
            return
        for start, stop in runs:
            self._will_need(0, start, stop)

    def _will_need(self, at: int, start: int, stop: int) -> None:
        mapping = self.mapping[at]
        if mapping is None or self.row_bytes * (stop - start) < ADVISED_FROM:
            return
        begin = self.begins[at] + start * self.row_bytes
        page = begin - begin % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, page, (stop - start) * self.row_bytes + begin - page)


class MmapDataset:
    """A map-style dataset whose rows stay in a file and are read when they are asked for, in any order.

    A row is a dict, a tuple or a tensor, like the source. `[index]` returns copy-on-write views of the mapping: they
    may be changed, but the file is not. `[slice]` and `[list or tensor of indices]` return batches in one copy, as
    `DataLoader(dataset, sampler=BatchSampler(...), batch_size=None)` requests them. All dtypes of safetensors are
    supported: bf16, fp8, bool and the rest.

    It is pickled to worker processes by path and mapped again there. Sources that do not know their file (Arrow tables,
    `torch.from_file(shared=False)`) cannot be pickled: pass the path instead. Files may be larger than the machine's
    memory. A file must not be truncated while it is mapped: access to the missing part ends the process. Replace a file
    by renaming. A process that unpickles the dataset refuses a file that has been written or replaced since.

    Args:
        source: The path of a .safetensors, .npy or Arrow (.arrow, .feather) file; or a tensor (`torch.from_file`), a
            `numpy.memmap`, an Arrow array or table; or a dict or tuple of these, fields of the same number of rows.
        fields: Names of the fields to read. A list: rows are tuples in its order. A single name: rows are the bare
            tensor.

    Raises:
        KeyError: A field does not exist.
        ValueError: A file is damaged or truncated, or fields differ in their number of rows. The error names the file.
        TypeError: A source or dtype is not supported.

    Examples:
        >>> dataset = memopt.data.MmapDataset("train.safetensors")
        >>> dataset[7], dataset[10:20], dataset[[5, 3, 9]]  # {"image": ..., "label": ...} each
    """

    def __init__(self, source: Any, fields: str | Sequence[str] | None = None) -> None:
        is_path = isinstance(source, str | os.PathLike)
        chunks, form = from_path(os.fspath(source)) if is_path else from_source(source)
        if fields is not None:
            names = names_of(fields)
            missing = [name for name in names if name not in chunks]
            if missing or not names:
                raise KeyError(
                    f"memopt.data.MmapDataset: no field {', '.join(map(repr, missing))}; there are {', '.join(chunks)}"
                )
            chunks = {name: chunks[name] for name in names}
            form = "single" if isinstance(fields, str) else "tuple"
        if not chunks:
            named = os.path.abspath(source) if is_path else repr(source)
            raise ValueError(f"memopt.data.MmapDataset: {named} has no fields")
        self._chunks, self._form = chunks, form
        # Arrow's own mapping cannot be made again from an offset: a worker opens the whole file.
        is_arrow = is_path and not all(isinstance(one, Part) for parts in chunks.values() for one in parts)
        self._reopened = (os.path.abspath(os.fspath(source)), fields) if is_arrow else None
        with mapped_file.naming(os.path.abspath(os.fspath(source))) if is_path else nullcontext():
            self._open()

    def _open(self) -> None:
        files = {one.file for chunk in self._chunks.values() for one in chunk if isinstance(one, Part)}
        self._mappings = {one: mapped_file.map_file(one) for one in files if one.size}
        self._fields = {}
        for name, chunks in self._chunks.items():
            if any(not one.shape for one in chunks):
                raise ValueError(
                    f"memopt.data.MmapDataset: field {name!r} has no dimension, and therefore no rows"
                )
            self._fields[name] = _Field(name, chunks, self._mappings)
        counts = {name: len(field) for name, field in self._fields.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"memopt.data.MmapDataset: the fields differ in their number of rows: {counts}")
        self._length = next(iter(counts.values()))

    def __reduce__(self) -> Any:
        if self._reopened is not None:
            return MmapDataset, self._reopened
        return _from_parts, (self._parts_alone(), self._form)

    def _parts_alone(self) -> dict[str, Any]:
        for name, chunks in self._chunks.items():
            if not all(isinstance(one, Part) for one in chunks):
                raise TypeError(
                    f"memopt.data.MmapDataset: field {name!r} does not know its file, so it cannot be sent to another "
                    "process without a copy; open it by its path (or torch.from_file with shared=True)"
                )
        return self._chunks

    # ---- rows ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._sliced(index)
        try:
            number = operator.index(index)
        except TypeError:
            return self._taken(index)
        return self._row(self._checked(number))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Rows as views, for DataLoader, whose collate_fn stacks them in one copy."""
        numbers = [self._checked(operator.index(one)) for one in indices]
        self._will_need(numbers)
        return [self._row(one) for one in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self._row(index) for index in range(self._length))

    def _checked(self, number: int) -> int:
        if not -self._length <= number < self._length:
            raise IndexError(f"row {number} of a dataset of {self._length} rows")
        return number % self._length

    def _row(self, index: int) -> Any:
        return self._formed({name: field.row(index) for name, field in self._fields.items()})

    def _sliced(self, index: slice) -> Any:
        import torch

        start, stop, step = index.indices(self._length)
        if step == 1:
            return self._formed({name: field.rows(start, stop) for name, field in self._fields.items()})
        return self._taken(start + step * torch.arange(len(range(start, stop, step))))

    def _taken(self, index: Any) -> Any:
        import torch

        indices = torch.as_tensor(index)
        if indices.dtype == torch.bool and indices.shape == (self._length,):
            indices = indices.nonzero().flatten()
        if indices.numel() == 0:
            indices = indices.to(torch.int64).flatten()
        if (
            indices.dim() != 1
            or indices.dtype.is_floating_point
            or indices.dtype.is_complex
            or indices.dtype == torch.bool
        ):
            raise TypeError(
                f"memopt.data.MmapDataset: rows are chosen by an int, a slice, a list or tensor of ints, or a mask of "
                f"{self._length} bools; got {indices.dtype} of shape {tuple(indices.shape)}"
            )
        indices = indices.to(torch.int64)
        wrong = indices[(indices < -self._length) | (indices >= self._length)]
        if len(wrong):
            raise IndexError(f"row {int(wrong[0])} of a dataset of {self._length} rows")
        indices = torch.where(indices < 0, indices + self._length, indices)
        self._will_need(indices)
        return self._formed({name: field.take(indices) for name, field in self._fields.items()})

    def _will_need(self, indices: Any) -> None:
        if all(field.row_bytes < ADVISED_FROM for field in self._fields.values()):
            return
        runs: list[tuple[int, int]] = []
        for number in sorted(set(indices if isinstance(indices, list) else indices.tolist())):
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        for field in self._fields.values():
            field.will_need(runs)

    def _formed(self, row: dict[str, Tensor]) -> Any:
        if self._form == "dict":
            return row
        return tuple(row.values()) if self._form == "tuple" else next(iter(row.values()))

    # ---- about it -----------------------------------------------------------------------------------------------

    @property
    def fields(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """The dtype and shape of a row, by field."""
        return {name: (field.dtype, tuple(field.row_shape)) for name, field in self._fields.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in the file."""
        return sum(field.row_bytes * len(field) for field in self._fields.values())

    def memory(self) -> MappedBytes:
        """Measure the memory of the mappings in this process: page cache, and the process's own copies.

        All mappings of the same files in this process count. It takes as long as the kernel needs to walk them.
        """
        return MappedBytes(*mapped_file.mapped_bytes(self._mappings.values()))

    def __repr__(self) -> str:
        named = ", ".join(
            f"{name}: {str(dtype).removeprefix('torch.')}{list(shape)}"
            for name, (dtype, shape) in self.fields.items()
        )
        return f"MmapDataset({self._length} rows of {named}; {_C.format_size(self.nbytes)} in files)"

    def _repr_html_(self) -> str:
        rows = [(name, str(dtype), str(list(shape))) for name, (dtype, shape) in self.fields.items()]
        head = f"{self._length} rows, {_C.format_size(self.nbytes)} in files; in memory: {self.memory()}"
        return paragraphs([head]) + ResultTable(rows, ("field", "dtype", "row"), left=()).html()


def _from_parts(chunks: dict[str, Any], form: str) -> MmapDataset:
    """A dataset as it was pickled: its files are mapped anew, and have to be those that they were."""
    made = MmapDataset.__new__(MmapDataset)
    made._chunks, made._form, made._reopened = chunks, form, None
    made._open()
    return made


# ---- the rows' sources: files, and tensors that somebody else has mapped ---------------------------------------------


Chunks = list[Any]
"""The parts of one field, one after the other: each a Part, or a tensor that is there already."""


def from_path(path: str) -> tuple[dict[str, Chunks], str]:
    """Return (fields, the form of a row: "dict", "tuple" or "single") of a file."""
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
            raise Malformed(f"{path}: its fields {', '.join(parts)} do not match rows of the form {form}")
        names.sort(key=int)
    elif form != "dict":
        raise Malformed(f"{path}: its rows have the unknown form {form!r}: expected dict, tuple or single")
    return {name: [parts[name]] for name in names}, form


def from_source(source: Any) -> tuple[dict[str, Chunks], str]:
    """Return the same as from_path, for a dict or tuple of sources, an Arrow table, or one source."""
    if isinstance(source, Mapping):
        chunks = {str(name): _chunks(one, f"field {name!r}") for name, one in source.items()}
        if len(chunks) < len(source):
            raise ValueError(
                "memopt.data.MmapDataset: two fields have the same name once names are converted to text"
            )
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
            raise ValueError(f"memopt.data.MmapDataset: {called} has no dimension, and therefore no rows")
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
    """Return the part of a file for a tensor of torch.from_file(shared=True), which knows its file; any other tensor is
    used as it is."""
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
    """Return an Arrow array as a tensor on Arrow's own memory.

    Lists of a fixed size are further dimensions of a row."""
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
            f"memopt.data.MmapDataset: {called} has {array.null_count} nulls, which tensors cannot hold: fill them "
            "(pyarrow.compute.fill_null) and write the file again"
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
    """Return torch's view of an array that may be read-only: its rows are returned as copies, so none is written to."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def names_of(fields: str | Sequence[str]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)
