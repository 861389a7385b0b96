"""The layout of optimizer states: in the order of their parameter's elements, in its type, fp32 or 8-bit codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt import _C

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BLOCK = 256


def is_plain(t: Tensor) -> bool:
    """True where the one-pass step can update this tensor (the exact question is asked in C, at each step)."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and t.device.type in ("cpu", "cuda")
        and t.dtype in FLOATS
        and not t.is_neg()
        and (t.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(t)))
    )


def wants_master(p: Tensor, group: dict[str, Any]) -> bool:
    return bool(group.get("master_weights")) and p.dtype in (torch.float16, torch.bfloat16) and is_plain(p)


def wants_codes(p: Tensor, group: dict[str, Any]) -> bool:
    return (
        group.get("state_bits", 32) == 8
        and p.numel() >= group["min_8bit_size"]
        and p.dtype is not torch.float64
        and is_plain(p)
    )


def like(p: Tensor, dtype: torch.dtype, value: Tensor | None = None) -> Tensor:
    """Return a tensor of p's shape, order and device: zeros, or the value, which is copied only if necessary."""
    p = p.detach()
    if value is None:
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    value = value.detach()
    fits = value.dtype is dtype and value.device == p.device and value is not p
    if fits and value.shape == p.shape and value.stride() == p.stride() and not value.is_neg():
        return value
    return torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(value)


def not_like(p: Tensor, state: dict[str, Any], name: str) -> str | None:
    """Describe why the state of that name, if there is one, is not one number for each of p's elements; None if it
    is."""
    value = state.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return f"its state {name!r} is {type(value).__name__}, not a tensor"
    if value.shape != p.shape:
        return f"its state {name!r} has the shape {tuple(value.shape)}"
    if not (value.is_floating_point() or value.is_complex()):
        return f"its state {name!r} is of {value.dtype}"
    return None


def one_step(value: Any, p: Tensor) -> Tensor:
    """Return the count of steps as a separate tensor: one fp32 on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype=torch.float32, device=p.device)
    return torch.tensor(float(value), dtype=torch.float32, device=p.device)


def blocks(p: Tensor) -> int:
    return -(-int(p.numel()) // BLOCK)


def no_codes(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of zeros."""
    return like(p, torch.uint8), torch.zeros(blocks(p), dtype=torch.float32, device=p.device)


def encoded(value: Tensor, p: Tensor, second: bool) -> tuple[Tensor, Tensor]:
    """Return a moment as codes in p's order, and their scales."""
    host = p.detach().to("cpu")
    codes, scales = no_codes(host)
    _C.adam_codes_encode(second, like(host, torch.float32, value), codes, scales)
    return codes.to(p.device), scales.to(p.device)


def decoded(codes: Tensor, scales: Tensor, second: bool) -> Tensor:
    """Return the fp32 moment for these codes, on their device and in their order."""
    codes_here = codes.to("cpu")
    values = torch.empty_like(codes_here, dtype=torch.float32, memory_format=torch.preserve_format)
    _C.adam_codes_decode(second, values, codes_here, scales.to(device="cpu", dtype=torch.float32).contiguous())
    return values.to(codes.device)
