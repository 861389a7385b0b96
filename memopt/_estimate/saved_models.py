"""torch.save and safetensors under an estimate: redirected files of the right names and sizes.

Tensors on a device with memory are zeros there, so their bytes are left out: the files have holes, and no model passes
through host memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import struct
from collections.abc import Callable
from typing import Any

import torch

_MOST_BYTES = 64 << 20  # live on the device, up to which all is written as it is
_SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def install(redirect: Callable[[Any], Any]) -> None:
    """Install the patches for the life of the process. redirect: from the script's path to the path to write to."""
    torch.save = _torch_save(torch.save, redirect)
    if importlib.util.find_spec("safetensors") is not None:
        module = importlib.import_module("safetensors.torch")
        saved = _safetensors_save(module.save_file, redirect)
        setattr(module, "save_file", saved)  # noqa: B010 (its type is not known here)


def _torch_save(original: Callable[..., None], redirect: Callable[[Any], Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        target = redirect(f) if isinstance(f, str | os.PathLike) else f
        if _device_bytes() <= _MOST_BYTES:
            return original(obj, target, *args, **kwargs)
        with torch.serialization.skip_data():
            return original(obj, target, *args, **kwargs)

    return save


def _safetensors_save(original: Callable[..., None], redirect: Callable[[Any], Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        target = redirect(filename)
        types = {tensor.dtype for tensor in tensors.values()}
        if _device_bytes() <= _MOST_BYTES or not types <= set(_SAFETENSORS_TYPES):
            return original(tensors, target, metadata)
        return _header_alone(tensors, target, metadata)

    return save_file


def _header_alone(tensors: dict[str, torch.Tensor], path: Any, metadata: Any) -> None:
    """The format is: eight bytes with the header's length, the header in JSON, and the tensors, here a hole."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _device_bytes() -> int:
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_initialized() else 0
