"""memopt.data.MmapWriter: rows written to a file as they come."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from memopt.data._array_bytes import bytes_of
from memopt.data._mmap import safetensors_layout

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 1 << 62
"""The header's place is kept for numbers of this length."""
BUFFER = 1 << 20
PADDING = "memopt.padding"
"""A tensor of up to 7 bytes between the first field and the next, where the next would else begin in the middle of an
element. MmapDataset leaves it out."""


class MmapWriter:
    """A writer of rows to a .safetensors file, for MmapDataset and anything else that reads safetensors.

    A row is a dict, a tuple or a single one of: tensors, NumPy arrays, numbers (int64, float32 and bool). The first row
    sets the fields, their dtypes and shapes. Rows are not kept in memory, and their number need not be known: the space
    for the header is reserved, and the header is written at the end.

    The file has another name in the same folder until `close`, which flushes it to the disk and renames it: under the
    given name there is always either a complete file or the previous one. In a `with` block an exception leaves nothing
    behind; a killed process leaves a file `<name>.<letters>.part`. If `close` fails (the disk is full), all rows are
    kept, and it may be called again. The field with the longest rows is written directly to the file, the others to
    files beside it, which are appended at the end: while this is done they take twice their bytes on the disk.

    Args:
        path: The file to write.
        metadata: Strings by name, stored in the header.

    Raises:
        TypeError: Metadata are not strings, or a row does not have the first row's structure.
        ValueError: A row's fields, dtypes or shapes differ from the first row's.
        OSError: The folder cannot be written; raised before the first row.

    Examples:
        >>> with memopt.data.MmapWriter("train.safetensors") as out:
        ...     for image, label in samples:
        ...         out.append({"image": image, "label": label})
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.metadata = dict(metadata or {})
        if any(type(text) is not str for one in self.metadata.items() for text in one):
            raise TypeError(f"MmapWriter: metadata must be a dict of text by name, got {self.metadata!r}")
        self.rows = 0
        self._form = ""
        self._kinds: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._order: list[str] = []
        self._parts: list[str] = []
        self._header = 0
        self._closed = False
        self._torn = False  # a row is in some fields' files and not, or not wholly, in others
        self._start()

    def _start(self) -> None:
        """Create the first file at once, so that a folder that cannot be written fails here, not after an hour."""
        self._main = self._file()

    def _file(self) -> IO[bytes]:
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"memopt.data.MmapWriter: there is no folder {folder} to write {self.path} to"
            )
        name = f"{self.path}.{uuid.uuid4().hex}.part"
        file = open(name, "x+b", buffering=BUFFER)  # noqa: SIM115
        self._parts.append(name)
        return file

    def append(self, row: Any) -> None:
        """Write one row.

        Args:
            row: The row's fields, of the same names, dtypes and shapes as the first row's.

        Raises:
            TypeError: A field has another type than the first row's; the message names it.
            ValueError: A field has another shape or dtype than the first row's; the message names it.
        """
        self._write(self._named(row), batch=False)

    def extend(self, rows: Any) -> None:
        """Write many rows.

        Args:
            rows: A batch (a dict, a tuple, a tensor or an array, the rows along its first dimension), or an iterable of
                rows.
        """
        import torch

        is_batch = isinstance(rows, dict | tuple | torch.Tensor) or hasattr(rows, "__array__")
        if is_batch:
            self._write(self._named(rows), batch=True)
        else:
            for row in rows:
                self.append(row)

    def _named(self, row: Any) -> dict[str, Tensor]:
        if self._closed:
            raise ValueError(f"MmapWriter: {self.path} is closed")
        self._check_whole()
        form = "dict" if isinstance(row, dict) else "tuple" if isinstance(row, tuple) else "single"
        if self._form and form != self._form:
            raise TypeError(f"MmapWriter: row {self.rows} is a {form} where the first was a {self._form}")
        items: Iterable[tuple[Any, Any]] = (
            row.items() if form == "dict" else enumerate(row) if form == "tuple" else [(0, row)]
        )
        items = [*items]
        found = {str(name): _tensor(value, str(name), self.rows) for name, value in items}
        if len(found) < len(items):
            raise ValueError(
                f"MmapWriter: row {self.rows} has two fields of the same name once names are "
                "converted to text"
            )
        if taken := found.keys() & {safetensors_layout.METADATA, PADDING}:
            raise ValueError(f"MmapWriter: no field can be called {taken.pop()!r}: the format reserves it")
        if not found or (self._kinds and found.keys() != self._kinds.keys()):
            raise ValueError(
                f"MmapWriter: row {self.rows} has fields {', '.join(found) or 'none'} where the first had "
                f"{', '.join(self._kinds) or 'at least one'}"
            )
        self._form = form
        return found

    def _write(self, named: dict[str, Tensor], batch: bool) -> None:
        counts = (
            {len(one) for one in named.values()}
            if batch and all(one.dim() for one in named.values())
            else {1}
        )
        if batch and (len(counts) > 1 or any(one.dim() == 0 for one in named.values())):
            shapes = {name: tuple(one.shape) for name, one in named.items()}
            raise ValueError(
                f"MmapWriter: a batch needs the same number of rows in each field, got shapes {shapes}"
            )
        kinds = {
            name: (one.dtype, tuple(one.shape[1:] if batch else one.shape)) for name, one in named.items()
        }
        if not self._kinds:
            self._begin(kinds)
        for name, kind in kinds.items():
            if kind != self._kinds[name]:
                raise ValueError(
                    f"MmapWriter: field {name!r} of row {self.rows} is {kind[0]}{list(kind[1])} where the first row's "
                    f"was {self._kinds[name][0]}{list(self._kinds[name][1])}: all rows must have the same dtype and "
                    "shape"
                )
        pieces = [(self._files[name], bytes_of(one)) for name, one in named.items()]
        self._torn = True
        for file, piece in pieces:
            file.write(piece)
        self.rows += counts.pop()
        self._torn = False

    def _check_whole(self) -> None:
        if self._torn:
            raise ValueError(
                f"MmapWriter: {self.path}: writing row {self.rows} was interrupted, so its fields no longer have the "
                "same number of rows: call abort(), and write the file again"
            )

    def _begin(self, kinds: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
        for name, (dtype, _) in kinds.items():
            if str(dtype) not in safetensors_layout.FROM_TORCH:
                raise TypeError(f"MmapWriter: field {name!r} is of {dtype}, which safetensors does not have")

        longest = max(kinds, key=lambda name: _row_bytes(*kinds[name]))
        others = sorted(
            (name for name in kinds if name != longest), key=lambda name: -kinds[name][0].itemsize
        )
        self._files = {longest: self._main, **{name: self._file() for name in others}}
        self._kinds, self._order = kinds, [longest, *others]
        self._header = len(self._header_bytes(MOST_ROWS, padding=15, length=0))
        self._main.seek(self._header)

    def _header_bytes(self, rows: int, padding: int, length: int) -> bytes:
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self._order:
            dtype, shape = self._kinds[name]
            tensors[name] = safetensors_layout.FROM_TORCH[str(dtype)], (rows, *shape)
            if padding and len(tensors) == 1:
                tensors[PADDING] = "U8", (padding,)
        metadata = {**self.metadata, "memopt.rows": self._form}
        return safetensors_layout.header_bytes(tensors, metadata, align=64, length=length)

    def close(self) -> None:
        """Finish the file and give it its name.

        Raises:
            ValueError: No row was written, so that no field is known; or the writing of a row was interrupted.
            OSError: The file cannot be finished. All rows are kept until abort(), and close() can be called again.
        """
        if self._closed:
            return
        self._check_whole()
        if not self._kinds:
            self.abort()
            raise ValueError(f"MmapWriter: {self.path} got no row, so it has no fields to write")
        try:
            self._finish()
        except OSError as error:
            raise OSError(
                error.errno,
                f"MmapWriter: {self.path} cannot be finished ({error.strerror or error}), and its {self.rows} rows "
                "are kept: free space or remove the cause, then call close() again; abort() discards them",
            ) from error
        self.abort()

    def _finish(self) -> None:
        """Write everything after the rows, from their end on, so that it can be repeated."""
        longest = self._order[0]
        written = self.rows * _row_bytes(*self._kinds[longest])
        self._main.seek(self._header + written)
        self._main.truncate()
        widest = max((self._kinds[name][0].itemsize for name in self._order[1:]), default=1)
        padding = (
            -written % widest
        )  # each field begins at a multiple of its elements' size, as a mapping needs it
        self._main.write(bytes(padding))
        for name in self._order[1:]:
            _append(self._files[name], self._main)
        self._main.seek(0)
        self._main.write(self._header_bytes(self.rows, padding, self._header))
        self._main.flush()
        os.fsync(self._main.fileno())
        os.replace(self._parts[0], self.path)
        self._parts.pop(0)
        with contextlib.suppress(OSError):  # not every file system can flush a folder
            folder = os.open(os.path.dirname(self.path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abort(self) -> None:
        """Discard everything that was written. Does nothing after `close`."""
        self._closed = True
        for file in (self._main, *self._files.values()):
            with contextlib.suppress(OSError):  # what its buffer still holds may not fit on the disk
                file.close()
        for name in self._parts:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        self._parts = []

    def __enter__(self) -> MmapWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._torn:
            self.close()
            return
        self.abort()
        if kind is None:
            self._check_whole()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "_main"):
            self.abort()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"MmapWriter({self.path!r}, {self.rows} rows, {state})"


def _row_bytes(dtype: Any, shape: tuple[int, ...]) -> int:
    return int(dtype.itemsize * math.prod(shape))


def _append(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    while piece := source.read(BUFFER):
        target.write(piece)


def _tensor(value: Any, name: str, row: int) -> Tensor:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(
                f"MmapWriter: field {name!r} of row {row} is {value.layout}: give value.to_dense()"
            )
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"MmapWriter: field {name!r} of row {row} is a {type(value).__qualname__}, which cannot be converted to a "
            f"tensor ({error})"
        ) from None
