"""memopt.compress.pack_inputs(): batches in fewer bits, and back, with a bound on what that changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memopt._runtime.results import Result
from memopt.compress._saved_report import Report, bytes_of

_INTEGERS = {torch.uint8: 255, torch.int16: 65535}
"""Steps between the smallest and the largest value."""
_PART = 1 << 17
"""Elements that are worked on at once, so that what is made on the way stays in a core's cache."""
_FAR = 2.0**100
"""Ranges beyond it, and below its inverse, are worked on in double precision."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in few bits.

    Unpacked, `values` are low + values * (high - low) / steps (int16 from -32768 on) or, of floating-point values, the
    same in `dtype`. max_error: the largest difference between any element and what comes back, measured on all of them;
    0.0 where nothing is lost.
    """

    values: torch.Tensor
    dtype: torch.dtype
    low: float
    high: float
    max_error: float

    def unpack(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Make the tensor again, in the shape and dtype that was packed.

        Args:
            device: The place of the new tensor, to which the few bits travel; by default where the values are.

        Returns:
            A new tensor.
        """
        return _restored(self.values.to(device or self.values.device), self.dtype, self.low, self.high)


@dataclass(frozen=True, repr=False)
class PackedInputs(Result):
    """A batch of the structure of the original, with PackedTensors in the place of packed tensors.

    `report`: bytes before and after. `max_error`: the largest error of all its tensors. The object can be pickled,
    saved and sent to workers like any batch.
    """

    _not_plain = ("batch",)

    batch: Any
    report: Report = field(compare=False)

    def __str__(self) -> str:
        return f"{self.report}\n  largest error {self.max_error:.3g}"

    @property
    def max_error(self) -> float:
        """The largest difference between a value and its unpacked value, over all packed tensors."""
        return max(
            (leaf.max_error for leaf in _leaves(self.batch) if isinstance(leaf, PackedTensor)), default=0.0
        )

    def unpack(self, device: torch.device | str | None = None) -> Any:
        """Return the batch with its tensors unpacked, all of them on one device.

        Args:
            device: The device of all tensors; by default they stay where they are.

        Returns:
            The batch.
        """

        def back(leaf: Any) -> Any:
            if isinstance(leaf, PackedTensor):
                return leaf.unpack(device)
            return leaf.to(device) if device is not None and isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(back, self.batch, is_leaf=_is_packed)


def pack_inputs(
    batch: Any, dtype: torch.dtype = torch.uint8, *, max_error: float | None = None
) -> PackedInputs:
    """Pack a batch's floating-point tensors into fewer bits, to be kept, cached or sent to a device.

    Args:
        batch: A tensor, or tensors in lists, tuples and dicts; integers, booleans and everything else are kept as they
            are.
        dtype: torch.uint8 or torch.int16: 256 or 65536 even steps from a tensor's smallest value to its largest; the
            error is at most half a step, (max - min) / 510 or / 131070, plus rounding. Whole numbers within the range
            of the type, and bytes divided by 255 as torchvision's ToTensor makes them, come back exactly. torch.float16
            or torch.bfloat16: rounded to 11 or 8 bits; the error is at most |x| / 2048 or / 256, and for float16 below
            6e-5 at most 3e-8.
        max_error: The largest permitted change of any element. A tensor that would change more is not packed, and the
            report says so. Each PackedTensor has its error, measured on all of its elements.

    Returns:
        A PackedInputs; .unpack(device) returns the batch.

    Raises:
        TypeError: The dtype is another one, or the batch has no tensor. Nothing is packed then, as with ValueError.
        ValueError: A tensor requires a gradient, is sparse or on the meta device, or has values that are infinite, NaN
            or beyond float16's largest.

    Examples:
        >>> packed = memopt.compress.pack_inputs(images, max_error=0.01)
        >>> images = packed.unpack("cuda")
    """
    if dtype not in (*_INTEGERS, torch.float16, torch.bfloat16):
        raise TypeError(
            f"dtype={dtype!r}: expected torch.uint8, torch.int16, torch.float16 or torch.bfloat16"
        )
    if max_error is not None and (
        isinstance(max_error, bool) or not isinstance(max_error, int | float) or not 0 <= max_error < math.inf
    ):
        raise ValueError(
            f"max_error={max_error!r}: expected a number of 0 or more, in the unit of the tensors"
        )
    tensors = {
        _name(path): leaf
        for path, leaf in pytree.tree_leaves_with_path(batch)
        if isinstance(leaf, torch.Tensor)
    }
    if not tensors:
        raise TypeError(f"pack_inputs: there is no tensor in this {type(batch).__name__}")
    wanted = {
        name: tensor for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize
    }  # fmt: skip
    for name, tensor in wanted.items():
        _check(name, tensor, dtype)
    packed: dict[int, PackedTensor] = {}
    changed, skipped = [], {}
    for name, tensor in wanted.items():
        one = packed.get(id(tensor)) or _pack(tensor.detach(), dtype)
        if max_error is not None and one.max_error > max_error:
            skipped[name] = f"it would change by up to {one.max_error:.3g}, more than max_error={max_error:g}"
            continue
        packed[id(tensor)] = one
        changed.append(name)
    result = pytree.tree_map(
        lambda leaf: packed.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    after = [leaf.values if isinstance(leaf, PackedTensor) else leaf for leaf in _leaves(result)]
    largest = max((one.max_error for one in packed.values()), default=0.0)
    report = Report(
        technique=f"pack_inputs {str(dtype).removeprefix('torch.')}",
        before=bytes_of(tensors.values(), lambda: batch),
        after=bytes_of((t for t in after if isinstance(t, torch.Tensor)), lambda: result),
        changed=tuple(changed),
        skipped=skipped,
        notes=(f"no element changes by more than {largest:.3g}",) if changed else (),
    )
    return PackedInputs(result, report)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedTensor)


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = pytree.tree_leaves(batch, is_leaf=_is_packed)
    return found


def _name(path: Any) -> str:
    return pytree.keystr(path).strip(".") or "the tensor"


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    whose = f"pack_inputs: {name}"
    if tensor.requires_grad:
        raise ValueError(f"{whose} requires a gradient, which does not pass through rounding: detach() it")
    if type(tensor) not in (torch.Tensor, torch.nn.Buffer) or tensor.layout is not torch.strided:
        raise ValueError(
            f"{whose} is a {type(tensor).__name__}, {tensor.layout}: only plain tensors are packed"
        )
    if tensor.is_meta:
        raise ValueError(f"{whose} is on the meta device and has no values")
    if not tensor.numel():
        return
    low, high = (float(bound) for bound in tensor.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):  # one NaN makes both NaN
        raise ValueError(f"{whose} has infinite or NaN values, which cannot be packed")
    if not dtype.is_floating_point:
        if not math.isfinite(high - low):
            raise ValueError(f"{whose}: the range from {low:g} to {high:g} is too large for even steps")
        return
    limit = torch.finfo(dtype).max
    if max(-low, high) > limit:
        raise ValueError(
            f"{whose}: its largest value is {max(-low, high):g}, but that of {dtype} is {limit:g}"
        )


def _pack(tensor: torch.Tensor, dtype: torch.dtype) -> PackedTensor:
    if not tensor.numel():
        return PackedTensor(tensor.to(dtype), tensor.dtype, 0.0, 0.0, 0.0)
    if dtype.is_floating_point:
        return _rounded(tensor, dtype)
    low, high = _range(tensor, dtype)
    values = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    steps = _INTEGERS[dtype]
    wide = _counting(tensor.dtype, low, high)
    error = torch.zeros((), dtype=wide, device=tensor.device)
    for part, source in zip(values.view(-1).split(_PART), tensor.reshape(-1).split(_PART), strict=True):
        whole = source.to(wide)
        part.copy_(torch.sub(whole, low).mul_(steps / (high - low or 1.0)).round_().sub_(_shift(dtype)))
        error = torch.maximum(
            error, _restored(part, tensor.dtype, low, high).to(wide).sub_(whole).abs_().max()
        )
    return PackedTensor(values, tensor.dtype, low, high, _rounded_up(error))


def _counting(dtype: torch.dtype, low: float, high: float) -> torch.dtype:
    """Return the dtype in which steps are counted: half types are too coarse."""
    if high > low and not 1 / _FAR < high - low < _FAR:
        return torch.float64
    return torch.promote_types(dtype, torch.float32)


def _rounded_up(error: torch.Tensor) -> float:
    """Return a difference, rounded up: in float32 it may be too small by its last bit."""
    found = float(error)
    return found if error.dtype == torch.float64 else found * (1 + 2.0**-23)


def _range(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the range that is divided into steps.

    It is the type's own for whole numbers within it, 0…1 for bytes divided by 255, else the tensor's.
    """
    low, high = (float(bound) for bound in tensor.aminmax())
    first = 0.0 - _shift(dtype)
    own = (first, first + _INTEGERS[dtype])
    if own[0] <= low and high <= own[1] and _all(tensor, lambda part: part == part.round()):
        return own
    if low >= 0.0 and high <= 1.0 and dtype == torch.uint8:
        if _all(tensor, lambda part: (part * 255).round().div(255).to(tensor.dtype) == part):
            return 0.0, 1.0
    return low, high


def _all(tensor: torch.Tensor, holds: Any) -> bool:
    return all(bool(holds(part).all()) for part in tensor.reshape(-1).split(_PART))


def _shift(dtype: torch.dtype) -> int:
    return 32768 if dtype == torch.int16 else 0


def _restored(values: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    if values.dtype.is_floating_point:
        return values.to(dtype)
    steps, shift = _INTEGERS[values.dtype], _shift(values.dtype)
    if high - low == steps and low == -shift:
        return values.to(dtype)
    # Divided first: 7 / 255, rounded once, is what ToTensor makes of a 7.
    wide = values.to(_counting(dtype, low, high))
    wide = wide.add_(shift).div_(steps) if shift else wide.div_(steps)
    return wide.to(dtype) if (low, high) == (0.0, 1.0) else wide.mul_(high - low).add_(low).to(dtype)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> PackedTensor:
    values = tensor.to(dtype)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    error = torch.zeros((), dtype=wide, device=tensor.device)
    for part, source in zip(values.reshape(-1).split(_PART), tensor.reshape(-1).split(_PART), strict=True):
        error = torch.maximum(error, part.to(wide).sub_(source).abs_().max())
    return PackedTensor(values, tensor.dtype, 0.0, 0.0, _rounded_up(error))
