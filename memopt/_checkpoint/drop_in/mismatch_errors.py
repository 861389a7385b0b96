"""Errors for a second run of a checkpointed region that differs from the first.

The exceptions and their text are torch's; a line that names the module and the operation is appended.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torchs

_TIP = getattr(torchs, "_debug_tip_msg", "")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_DEVICE_TYPES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda"}  # DLPack's numbers; the memory of 3 is pinned
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}


class Note(NamedTuple):
    """A tensor that is not as it was, and where it was saved."""

    saved: str
    remade: str
    place: str


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's shape, dtype and device: for tensors that DLPack cannot describe, and for messages."""
    with torch.no_grad():
        return {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}


def equal(saved: Any, tensor: torch.Tensor) -> bool:
    """Return whether a tensor matches the saved description, which comes from describe() or is DLPack's numbers."""
    before: dict[str, Any] = _metadata(saved) if isinstance(saved, tuple) else saved
    return before == describe(tensor)


def note(function: Callable[..., Any], index: int, saved: Any, tensor: torch.Tensor) -> Note:
    """Describe the mismatch while the function runs again, when the frames are still there."""
    before = _metadata(saved) if isinstance(saved, tuple) else saved
    return Note(str(before), str(describe(tensor)), _place(function))


def complain(kind: str, function: Callable[..., Any], first: Any, second: Any) -> Exception:
    """The exception for a kind of difference."""
    if kind == "fewer":
        text = (
            "torch.utils.checkpoint: A different number of tensors was saved "
            "during the original forward and recomputation.\n"
            f"Number of tensors saved during forward: {first}\n"
            f"Number of tensors saved during recomputation: {second}.\n"
            f"{_TIP}"
        )
        ours = f"{_named(function)} saved {first} tensors at first, and {second} when run again"
    elif kind == "more":
        text = (
            "torch.utils.checkpoint: trying to save more tensors during "
            "recomputation than during the original forward pass.\n"
            f"{_TIP}"
        )
        ours = f"{_named(function)} saved {first} tensors; the next one is saved in {_place(function)}"
    elif kind == "twice":
        extra = ""
        if first is not None:
            extra = (
                "Performing two backward calls that overlap (i.e. require the same "
                "saved activation in order to compute gradients) is not allowed while "
                "under the torch.utils.checkpoint.GraphExecGroup context. "
            )
        text = (
            "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already "
            f"unpacked once. {extra}If you are calling ctx.saved_tensors in backward, make sure "
            "to do so only once. Otherwise please open an issue with details on your use case."
        )
        ours = f"the tensor was saved in {_named(function)}"
    else:
        notes: list[tuple[int, Note]] = first
        text = (
            "torch.utils.checkpoint: Recomputed values for the following tensors "
            "have different metadata than during the forward pass.\n"
            + "".join(
                f"tensor at position {index}:\nsaved metadata: {one.saved}\n"
                f"recomputed metadata: {one.remade}\n"
                for index, one in notes
            )
            + f".\n{_TIP}"
        )
        ours = "; ".join(f"position {index} is saved in {one.place}" for index, one in notes[:3])
        if len(notes) > 3:
            ours += f"; and {len(notes) - 3} more"
    error: Exception = torchs.CheckpointError(f"{text}\nmemopt: {ours}")
    return error


# ---- tensors as torch names them -------------------------------------------------------------------------------------


def _metadata(saved: tuple[int, int, int, tuple[int, ...]]) -> dict[str, Any]:
    device_type, device_index, dtype, sizes = saved
    name = _DEVICE_TYPES.get(device_type, f"device type {device_type}")
    device: Any = name
    if device_type in _DEVICE_TYPES:
        device = torch.device(name) if name == "cpu" else torch.device(name, device_index)
    return {"shape": torch.Size(sizes), "dtype": _dtype(dtype), "device": device}


def _dtype(code: int) -> Any:
    """Return the dtype of DLPack's code << 24 | bits << 16 | lanes."""
    kind, bits = code >> 24, code >> 16 & 0xFF
    name = "bool" if kind == 6 else f"{_KINDS.get(kind, '?')}{bits}"
    return getattr(torch, name, f"DLPack's type {kind} of {bits} bits")


# ---- where -----------------------------------------------------------------------------------------------------------


def _named(function: Callable[..., Any]) -> str:
    """A function or module, for people."""
    if isinstance(function, torch.nn.Module):
        return f"the module {type(function).__name__}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return f"the module {type(owner).__name__} ({getattr(function, '__name__', '?')})"
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{name}()"


def _place(function: Callable[..., Any]) -> str:
    """The innermost module and line of the user's that the function is at. A line of torch's stands for itself only
    where there is no other."""
    line = ""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    inner = True  # within the frames of ours that ask
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OWN):
            if not inner:
                break
        else:
            inner = False
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and (not modules or modules[-1] is not module):
                modules.append(module)
            if not line and not path.startswith(_TORCH):
                line = f"`{_call(frame)}`, {path}:{frame.f_lineno}"
        frame = frame.f_back
    where = _path(modules) if modules else _named(function)
    return f"{where} by {line}" if line else where


def _path(modules: list[torch.nn.Module]) -> str:
    """Return nested modules, innermost first, as a path from the outermost: 'the module Block (Net.blocks.3)'."""
    names = [type(modules[-1]).__name__]
    for outer, inner in zip(reversed(modules), reversed(modules[:-1]), strict=False):
        names.append(next((name for name, one in outer.named_modules() if one is inner), "?"))
    inner_name = type(modules[0]).__name__
    return f"the module {inner_name}" + (f" ({'.'.join(names)})" if len(names) > 1 else "")


def _call(frame: FrameType) -> str:
    """The source of what a frame is calling."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    first, last, start, end = positions[at] if at < len(positions) else (None, None, None, None)
    if first == last == frame.f_lineno and start is not None and end is not None:
        return line.encode()[start:end].decode(errors="replace") or "?"
    return line.strip() or "?"
