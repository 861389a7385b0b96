"""Serialization of a model and its parts for another process, and the script that runs it there.

Tensors are sent as shapes. Values are sent where a program may read them: integers and booleans up to a size, and a few
floating-point numbers. All other tensors arrive on the device as memory of the right size. Functions and classes are
sent by name if the other process can import them, else by cloudpickle, if that is installed.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memopt._runtime.log import logger

try:
    from cloudpickle import CloudPickler as _Base
except ImportError:
    _Base = pickle.Pickler

BY_VALUE = _Base is not pickle.Pickler  # whether what has no importable name can go, too
_WHOLE = 32 << 20  # bytes of whole numbers that go with their values
_FEW = 16  # floating-point numbers that do


class NotSerializable(ValueError):
    """Raised for an object that cannot be sent to another process. The message says which, and names a remedy."""


@dataclass
class _SentStorage:
    """A storage. Made on the device where it arrives."""

    size: int
    dtype: torch.dtype
    values: bytes | None
    made: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        if self.made is None:
            count = self.size // self.dtype.itemsize
            if self.values is None:
                there = torch.empty(count, dtype=self.dtype, device=_device)
            else:
                here = torch.frombuffer(bytearray(self.values), dtype=self.dtype) if count else torch.empty(0)
                there = here.to(_device)
            self.made = there.untyped_storage()
        return self.made


_device = "cpu"  # where loads() makes tensors


class _ByShapes(_Base):  # type: ignore[misc, valid-type]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memories: dict[int, tuple[torch.UntypedStorage, _SentStorage]] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return _tensor, self._form(thing)
        if (
            not BY_VALUE
            and getattr(thing, "__module__", None) == "__main__"
            and hasattr(thing, "__qualname__")
        ):
            raise NotSerializable(
                f"{thing.__qualname__} is defined in __main__, where another process cannot find it: put it into a "
                "module, or install cloudpickle (pip install 'memopt[estimate]')"
            )
        return super().reducer_override(thing) if BY_VALUE else NotImplemented

    def _form(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        kind = type(tensor)
        if (
            kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
            or tensor.layout is not torch.strided
        ):
            raise NotSerializable(
                f"a tensor of type {kind.__name__}, {tensor.layout} cannot be sent to the child process as plain memory"
            )
        storage = tensor.untyped_storage()
        known = self.memories.get(storage._cdata)
        if known is None:
            known = self.memories[storage._cdata] = storage, _memory(tensor, storage)
        place = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        needs_grad = tensor.requires_grad and tensor.is_leaf
        return known[1], tensor.dtype, *place, needs_grad, issubclass(kind, torch.nn.Parameter)


def _memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> _SentStorage:
    size, dtype = storage.nbytes(), tensor.dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    values = None
    if (
        size <= (_WHOLE if whole else _FEW * dtype.itemsize)
        and not tensor.is_meta
        and size % dtype.itemsize == 0
    ):
        all_of_it = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)
        values = bytes(all_of_it.cpu().view(torch.uint8).numpy()) if size else b""
    return _SentStorage(size, dtype, values)


def _tensor(
    memory: _SentStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    needs_grad: bool,
    parameter: bool,
) -> torch.Tensor:
    storage = memory.storage()
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    return torch.nn.Parameter(made, needs_grad) if parameter else made.requires_grad_(needs_grad)


def dumps(thing: Any) -> bytes:
    """Serialize a model and its parts. Raise NotSerializable for what cannot be sent."""
    file = io.BytesIO()
    try:
        _ByShapes(file).dump(thing)
    except NotSerializable:
        raise
    except Exception as error:  # whatever a __reduce__ of the user's raises
        raise NotSerializable(f"{type(error).__name__}: {error}") from error
    made = file.getvalue()
    logger.info("estimate: the model is sent as %d bytes", len(made))
    return made


def loads(content: bytes, device: str) -> Any:
    """Load what dumps() wrote, with its tensors on a device."""
    global _device
    before, _device = _device, device
    try:
        return pickle.loads(content)
    finally:
        _device = before


def import_paths() -> list[str]:
    """Return this process's import paths for the user's modules, without a Python's installed packages."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [path or "." for path in sys.path if path not in own and not path.endswith((".zip", "-packages"))]


# ---- the process that runs it ----------------------------------------------------------------------------------------


def main(path: str) -> None:
    """Run the training in a file that estimate() has written: import paths, and what dumps() made."""
    paths, content = pickle.loads(Path(path).read_bytes())
    sys.path += [one for one in map(os.path.abspath, paths) if one not in sys.path]
    from memopt._estimate import serialization  # the module that the file names, which __main__ is not

    serialization.loads(content, "cuda").run("cuda")


if __name__ == "__main__":
    main(sys.argv[1])
