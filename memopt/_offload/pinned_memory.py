"""Tensors between a CUDA device and pinned host memory, beside the computation, in an order that streams alone keep:
the host waits for nothing. The copies are memopt._C's (csrc/transfer/copies.h), a stream each way.

    host = pinned_tensor(device, nbytes)
    ticket = _C.copy_out(tensor, host)           begins once `tensor` is whole
    _C.copy_await(device.index, ticket)          from here on the present stream may overwrite it or be given its memory
    incoming = IncomingBytes(nbytes, device)
    incoming.begin(host, ticket)                 the copy back begins, behind the copy out
    incoming.tensor()                            for the present stream"""

from __future__ import annotations

import sys

import torch

from memopt import _C


def pinned_tensor(device: torch.device, nbytes: int) -> torch.Tensor:
    """Page-locked bytes (torch.uint8), exactly so many, not rounded as torch's own are. Taking them takes long, and
    giving them back waits for the device: they are to be kept."""
    return torch.frombuffer(_C.PinnedMemory(index_of(device), nbytes), dtype=torch.uint8)


def index_of(device: torch.device) -> int:
    return int(torch.cuda.current_device()) if device.index is None else device.index


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A dense tensor's memory, as torch.uint8; None where it has gaps, or is not what its memory says."""
    dense = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if tensor.is_conj() or tensor.is_neg() or not dense:
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


class CopyIn:
    """A copy that fills new memory of a device. owner: the stream that the memory belongs to."""

    __slots__ = ("owner", "ticket")

    def __init__(self, owner: torch.cuda.Stream, ticket: int) -> None:
        self.owner, self.ticket = owner, ticket

    def join(self, tensor: torch.Tensor) -> bool:
        """Make what the present stream is given from now on wait for the copy. Return whether it is the owner."""
        user = torch.cuda.current_stream(tensor.device)
        _C.copy_await(tensor.device.index, self.ticket, user.cuda_stream)
        if user == self.owner:
            return True
        tensor.record_stream(user)
        return False


class IncomingBytes:
    """New memory of a device, and bytes on their way into it from the host."""

    __slots__ = ("_awaited", "_owner", "_tensor", "copy")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._awaited = True  # until there is something to wait for
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._owner = torch.cuda.current_stream(device)
        self.copy: CopyIn | None = None

    def begin(self, host: torch.Tensor, after: int = 0) -> CopyIn:
        """Begin to copy them. host: pinned, torch.uint8, kept as it is until the copy is over. after: the ticket of the
        copy that filled it."""
        ticket = _C.copy_in(host, self._tensor, after, self._owner.cuda_stream)
        self.copy, self._awaited = CopyIn(self._owner, ticket), False
        return self.copy

    def tensor(self) -> torch.Tensor:
        """The bytes, for what the present stream is given from now on."""
        assert self.copy is not None
        self._awaited |= self.copy.join(self._tensor)
        return self._tensor

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and self.copy is not None and not sys.is_finalizing():
            _C.copy_await(self._tensor.device.index, self.copy.ticket, self.copy.owner.cuda_stream)
