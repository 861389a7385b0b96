"""Storages of floats in 8 bits, on their own device.

A block of 256 elements has its largest absolute value beside it, in the storage's dtype. Of 127 even steps on each side
of zero, an element becomes the middle of the one that it is in, where the middle of the last is the largest value: the
error is at most 1/253 of that. Zeros alone become zeros, so that the backward pass of a ReLU, which asks its result
where it is more than zero, is exact. The code that is left says -inf, as in masks; a block with +inf or NaN comes back
without a finite value. Nothing random is drawn.

The scheme is the blockwise quantization of Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), with
even steps; that saved activations bear 8 bits, and fewer: Chen et al., ActNN (2021); Liu et al., GACT (2022)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from memopt._offload.transfers import StorageTransfer

EIGHT_BITS = "8bit"  # as a place beside the host and a disk
BLOCK = 256  # elements
SMALL = 32  # storages of this part of the largest, or less, stay as they are
# Of the largest value, which the last code does not exceed, however it is rounded.
STEP = (1 - 2**-22) / 126.5
MINUS_INF = -128
CODED = (torch.float32, torch.float16, torch.bfloat16)
# Elements at a time, at least and at most: of a GPU so many that its kernels take longer than their launches, and of a
# large storage a 16th, so that it has few pieces; of a CPU what its caches hold.
PIECES = {"cuda": (1 << 21, 1 << 24)}
PIECES_ELSEWHERE = (1 << 18, 1 << 18)


def can_code(dtype: torch.dtype | None, nbytes: int, largest: int) -> bool:
    """Return whether a storage is coded.

    A small one saves little, and may be statistics of rows that must be more exact, such as attention's logsumexp, of
    which a backward pass takes the exponential.

    Args:
        dtype: Of the tensors of it that were saved; None of several.
        nbytes: Its bytes.
        largest: Bytes of the largest storage beside it that only the backward pass holds.
    """
    return dtype in CODED and nbytes % dtype.itemsize == 0 and nbytes * SMALL > largest


def code_bytes(nbytes: int, dtype: torch.dtype) -> int:
    """Return the bytes of a storage's codes."""
    size: int = dtype.itemsize
    return -(-nbytes // size // BLOCK) * (BLOCK + size)


def work_bytes(nbytes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that coding a storage takes besides its codes, while it runs; decoding takes half."""
    blocks = code_bytes(nbytes, dtype) // (BLOCK + dtype.itemsize)
    return 2 * 4 * BLOCK * _at_a_time(blocks, device)


def _at_a_time(blocks: int, device: torch.device) -> int:
    """Return the number of blocks in a piece."""
    least, most = (size // BLOCK for size in PIECES.get(device.type, PIECES_ELSEWHERE))
    return min(blocks, max(least, min(most, blocks // 16)))


class Codes:
    """The codes of a flat tensor, made by the present stream."""

    __slots__ = ("_codes", "_dtype", "_largest", "_numel")

    def __init__(self, flat: torch.Tensor) -> None:
        self._numel, self._dtype = flat.numel(), flat.dtype
        blocks = -(-self._numel // BLOCK)
        self._codes = torch.empty((blocks, BLOCK), dtype=torch.int8, device=flat.device)
        self._largest = torch.empty((blocks, 1), dtype=flat.dtype, device=flat.device)
        for some, elements, (values, finite) in self._pieces(2):
            part = flat[elements]
            if (source := _as_blocks(part, values)) is None:
                source = values
                source.view(-1)[: part.numel()].copy_(part)
                if part.numel() < source.numel():
                    source.view(-1)[part.numel() :].zero_()
            torch.nan_to_num(source, nan=math.nan, posinf=math.inf, neginf=0.0, out=finite)
            largest = finite.abs_().amax(1, keepdim=True)
            torch.div(source, _steps(largest), out=values)
            torch.sign(values, out=finite)
            values.add_(finite).nan_to_num_(nan=0.0, neginf=MINUS_INF)
            self._codes[some].copy_(values)  # towards zero: of the first step it is 1
            self._largest[some].copy_(largest)

    def decoded(self) -> torch.Tensor:
        """Return a new flat tensor."""
        flat = torch.empty(self._numel, dtype=self._dtype, device=self._codes.device)
        for some, elements, (values,) in self._pieces(1):
            part = flat[elements]
            result = _as_blocks(part, values)
            values = values if result is None else result
            values.copy_(self._codes[some])
            torch._C._nn.softshrink(values, 0.5, out=values)  # half a step towards zero
            torch.threshold_(values, MINUS_INF + 1.0, -math.inf)
            values.mul_(_steps(self._largest[some].float()))
            if result is None:
                part.copy_(values.view(-1)[: part.numel()])
        return flat

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._codes, self._largest

    def _pieces(self, count: int) -> Iterator[tuple[slice, slice, list[torch.Tensor]]]:
        """Yield some blocks, their elements, and so many tensors in fp32 for these, in the same memory each time."""
        device, blocks = self._codes.device, self._codes.shape[0]
        most = _at_a_time(blocks, device)
        work = [torch.empty((most, BLOCK), dtype=torch.float32, device=device) for _ in range(count)]
        for first in range(0, blocks, max(most, 1)):
            last = min(first + most, blocks)
            yield (
                slice(first, last),
                slice(first * BLOCK, last * BLOCK),
                [one[: last - first] for one in work],
            )


def _as_blocks(part: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Return whole blocks of fp32 as such, without a copy; None of others."""
    return part.view_as(values) if part.dtype == values.dtype and part.numel() == values.numel() else None


def _steps(largest: torch.Tensor) -> torch.Tensor:
    """Return the distance of a block's codes; not 0, nor so small that it is inexact."""
    return (largest * STEP).clamp_(min=torch.finfo(torch.float32).tiny)


class CodedTransfer(StorageTransfer):
    """A storage that is coded, and decoded when it is wanted, by the present stream; nothing runs beside it.

    flat: the storage as one tensor of its dtype. stream: the one that it was made on, 0 on a CPU."""

    __slots__ = ("_codes", "_flat", "_stream")

    def __init__(self, flat: torch.Tensor, stream: int) -> None:
        _follow(stream, flat)
        self._codes, self._stream = Codes(flat), _stream_of(flat.device)
        self._flat: torch.Tensor | None = None

    def settle(self) -> None:
        pass

    def fetch(self) -> None:
        pass  # earlier it would only take memory

    def back(self) -> torch.Tensor:
        if self._flat is None:
            _follow(self._stream, *self._codes.tensors())
            self._flat, self._stream = self._codes.decoded(), _stream_of(self._codes.tensors()[0].device)
        else:
            _follow(self._stream, self._flat)
        return self._flat.view(torch.uint8)

    def join(self, storage: torch.UntypedStorage) -> None:
        _follow(self._stream, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

    def forget(self) -> None:
        self._flat = None


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _follow(stream: int, *made: torch.Tensor) -> None:
    """Have the present stream wait for what a stream made, and the memory of that for the present one."""
    device = made[0].device
    if device.type != "cuda" or (user := torch.cuda.current_stream(device)).cuda_stream == stream:
        return
    user.wait_stream(torch.cuda.ExternalStream(stream, device))
    for tensor in made:
        tensor.record_stream(user)
