"""Dequantization: tensors of small numbers become floating point and are normalised where they are used, in one pass
(csrc/data/widen.h), so that images travel, and wait, in a quarter of the bytes.

    widened = ((x.float() * scale) - mean) / std        .div(255) instead of * scale, where scale is True and x is uint8

bit for bit what these operations of torch's give on the CPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch

from memopt import _C
from memopt._runtime import kernels

Key = int | str
Numbers: TypeAlias = "float | Sequence[float] | torch.Tensor"

NARROW = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16)
TARGETS = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST = {torch.uint8: 255.0, torch.int8: 127.0, torch.uint16: 65535.0, torch.int16: 32767.0}


class Widening:
    """The leaves of a batch that are widened, and how.

    keys: their paths (batch_transport.map_leaves), or those of containers around them; True: all tensors of NARROW.
    scale: a factor; True divides integers by the largest number of their dtype. channels: the dimension of
    mean and std."""

    def __init__(
        self,
        keys: bool | Key | Collection[Key],
        mean: Numbers | None,
        std: Numbers | None,
        scale: float | bool | None,
        dtype: torch.dtype,
        channels: int,
    ) -> None:
        if keys is True:
            self.keys: tuple[str, ...] | None = None
        elif isinstance(keys, int | str):
            self.keys = (str(keys),)
        else:
            self.keys = tuple(str(key) for key in keys)
        if dtype not in TARGETS:
            raise ValueError(f"dtype={dtype}: expected one of {', '.join(map(str, TARGETS))}")
        if scale is not None and scale is not True and not math.isfinite(scale):
            raise ValueError(f"scale={scale}: expected a finite factor, or True")
        self.mean, self.std = _numbers("mean", mean), _numbers("std", std)
        if self.std is not None and bool((self.std == 0).any()):
            raise ValueError("std contains a zero, by which values cannot be divided")
        if self.mean is not None and self.std is not None and self.mean.numel() != self.std.numel():
            if 1 not in (self.mean.numel(), self.std.numel()):
                raise ValueError(f"{self.mean.numel()} means, but {self.std.numel()} standard deviations")
            self.mean, self.std = (t.clone() for t in torch.broadcast_tensors(self.mean, self.std))
        self.scale, self.dtype, self.channels = scale, dtype, channels
        self._count = max((t.numel() for t in (self.mean, self.std) if t is not None), default=1)

    def applies(self, path: str, leaf: object) -> bool:
        if self.keys is None:
            return isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW
        return any(path == key or path.startswith(f"{key}.") for key in self.keys)

    def check(self, path: str, leaf: object) -> None:
        """Refuse a leaf that cannot be widened, before anything is copied."""
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"widen: {path!r} is of type {type(leaf).__qualname__}, not a tensor: name the tensors in it"
            )
        if leaf.dtype not in (*NARROW, torch.float32) or leaf.layout is not torch.strided:
            raise TypeError(
                f"widen: {path!r} is of {leaf.dtype}: expected {', '.join(map(str, NARROW))} or torch.float32; leave "
                "the tensor out of widen= and convert it in the loader"
            )
        if self._count > 1 and (
            not -leaf.dim() <= self.channels < leaf.dim() or leaf.shape[self.channels] != self._count
        ):
            raise ValueError(
                f"widen: {path!r} of shape {tuple(leaf.shape)} does not have {self._count} channels in dimension "
                f"{self.channels}: give channel_dim=, or one number for each channel"
            )

    def missing(self, paths: Collection[str]) -> list[str]:
        """Return the keys that match none of these paths."""
        return [
            key
            for key in self.keys or ()
            if not any(path == key or path.startswith(f"{key}.") for path in paths)
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Widen on the leaf's device, after earlier work of the current stream; a dense leaf keeps its memory order."""
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        tensor = tensor.detach()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        wide = torch.empty_like(tensor, dtype=self.dtype)
        if wide.stride() != tensor.stride():
            tensor = tensor.contiguous()  # it had gaps, or one number in several places
            wide = torch.empty_like(tensor, dtype=self.dtype)
        if tensor.is_cuda:
            kernels.prepare()
        inner = tensor.stride(self.channels) if self._count > 1 else 1
        divide = self.scale is True
        factor = _LARGEST.get(tensor.dtype, 1.0) if divide else 1.0 if self.scale is None else self.scale
        _C.widen(tensor, wide, self.mean, self.std, inner, factor, divide)
        return wide


def _numbers(name: str, values: Numbers | None) -> torch.Tensor | None:
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float32, device="cpu").detach().reshape(-1).clone()
    if not found.numel() or not bool(found.isfinite().all()):
        raise ValueError(f"{name}={values}: expected finite numbers, one in all or one for each channel")
    return found
