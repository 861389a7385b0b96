"""The layout of optimizer states: in the order of their parameter's elements, in its type, fp32, or few-bit codes.

Codes of 8 bits have their parameter's shape and order. Two of 4 bits are in a byte of a 1-d tensor, of parameters that
are contiguous: its shape could not tell another order, so other parameters have 8 bits instead.

A factored second moment is two vectors of fp32: the averages of the squares' means of each row and of each column of
the parameter as a matrix, in which its first dimensions count the rows and its last ones the columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memopt import _C

ROW, COLUMN = FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BLOCK = 256
GRAIN = 4096  # elements: a piece has a multiple, so that blocks of codes are whole and accesses aligned


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


def wanted_bits(p: Tensor, group: dict[str, Any]) -> int:
    """Return the bits of the codes of p's moments, 8 or 4; 0 where they are no codes."""
    bits = group.get("state_bits", 32)
    large = p.numel() >= max(2, group.get("min_8bit_size", 2))  # one number is no block
    if bits == 32 or not large or p.dtype is torch.float64 or not is_plain(p):
        return 0
    return int(bits) if p.is_contiguous() else 8


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Return rows and columns of p as the matrix that has the fewest of both together."""
    shapes = [(math.prod(p.shape[:k]), math.prod(p.shape[k:])) for k in range(1, p.dim())]
    return min(shapes, key=sum, default=(1, int(p.numel())))


def is_matrix(p: Tensor) -> bool:
    """Return whether p's second moment can be factored: the two vectors take half a byte an element at most."""
    return (
        p.dtype is not torch.float64
        and is_plain(p)
        and p.is_contiguous()
        and 8 * sum(matrix_shape(p)) <= p.numel()
    )


def wants_factors(p: Tensor, group: dict[str, Any]) -> bool:
    return bool(group.get("factored")) and p.numel() >= group.get("min_8bit_size", 2) and is_matrix(p)


def no_factors(p: Tensor) -> list[Tensor]:
    """Return the averages of rows and of columns of a second moment of zeros."""
    return [torch.zeros(count, dtype=torch.float32, device=p.device) for count in matrix_shape(p)]


def factors(value: Tensor, p: Tensor) -> list[Tensor]:
    """Return the means of the rows and of the columns of a second moment; what is not finite counts as 0."""
    matrix = value.detach().to(p.device).double().reshape(matrix_shape(p))
    matrix = matrix.masked_fill(~matrix.isfinite(), 0)
    return [matrix.mean(dim).clamp(max=torch.finfo(torch.float32).max).float() for dim in (1, 0)]


def product(row: Tensor, column: Tensor, p: Tensor) -> Tensor:
    """Return p's fp32 second moment for these averages, as kernels/factored.cuh multiplies them."""
    mean = row.double().mean().float()
    inverse = torch.where(mean >= torch.finfo(torch.float32).tiny, 1 / mean, 0)
    return ((row.float() * inverse)[:, None] * column.to(row.device).float()).view(p.shape)


def codes_shape(p: Tensor, bits: int) -> tuple[int, ...]:
    return tuple(p.shape) if bits == 8 else (-(-int(p.numel()) // 2),)


def held_bits(p: Tensor, codes: Any) -> int:
    """Return the bits of these codes of a moment of p; 0 if they cannot be that."""
    if not isinstance(codes, Tensor) or codes.dtype is not torch.uint8:
        return 0
    return next((bits for bits in (8, 4) if codes.shape == codes_shape(p, bits)), 0)


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


def elements_per(p: Tensor, state: Any) -> int:
    """Return of how many of p's elements each of a state's is, in the order of memory; 0 where it is not so."""
    if not isinstance(state, Tensor) or state.layout is not torch.strided:
        return 0
    if state.shape == p.shape:
        return int(state.stride() == p.stride())
    row = {codes_shape(p, 4): 2, (blocks(p),): BLOCK}
    return row.get(tuple(state.shape), 0) if state.is_contiguous() else 0


def one_step(value: Any, p: Tensor) -> Tensor:
    """Return the count of steps as a separate tensor: one fp32 on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype=torch.float32, device=p.device)
    return torch.tensor(float(value), dtype=torch.float32, device=p.device)


def blocks(p: Tensor) -> int:
    return -(-int(p.numel()) // BLOCK)


def no_codes(p: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of zeros."""
    scales = torch.zeros(blocks(p), dtype=torch.float32, device=p.device)
    if bits == 8:
        return like(p, torch.uint8), scales
    return torch.zeros(codes_shape(p, bits), dtype=torch.uint8, device=p.device), scales


def encoded(value: Tensor, p: Tensor, second: bool, bits: int) -> tuple[Tensor, Tensor]:
    """Return a moment as codes in p's order, and their scales."""
    host = p.detach().to("cpu")
    codes, scales = no_codes(host, bits)
    _C.adam_codes_encode(bits, second, like(host, torch.float32, value), codes, scales)
    return codes.to(p.device), scales.to(p.device)


def decoded(codes: Tensor, scales: Tensor, second: bool, p: Tensor) -> Tensor:
    """Return p's fp32 moment for these codes, on their device and, with 8 bits, in their order."""
    bits, here = held_bits(p, codes), codes.to("cpu")
    if bits == 8:
        values = torch.empty_like(here, dtype=torch.float32, memory_format=torch.preserve_format)
    else:
        here, values = here.contiguous(), torch.empty(p.shape, dtype=torch.float32)
    _C.adam_codes_decode(
        bits, second, values, here, scales.to(device="cpu", dtype=torch.float32).contiguous()
    )
    return values.to(codes.device)
