"""memopt.offload_activations: what a forward pass saves for its backward pass waits on the host, or on a disk."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from memopt import _C
from memopt._offload.disk_space import DiskSpace, disk_space, give_up
from memopt._offload.pinned_pool import host_memory
from memopt._offload.saved_storages import SavedStorage, SavedStorages
from memopt._offload.transfers import DiskTransfer, PinnedTransfer, StorageTransfer, WriteQueue


class SavedTensor:
    """The graph's entry for a tensor: a view of a storage that may be away (`saved`), or the tensor."""

    __slots__ = ("_dtype", "_offset", "_round", "_saved", "_size", "_stride", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, saved: SavedStorage | None) -> None:
        alias = tensor.detach()  # counts versions with the tensor's own
        self._version, self._saved = tensor._version, saved
        if saved is not None:
            self._round = saved.one_more()
            self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
            self._offset = tensor.storage_offset()
            alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # and holds nothing
        self._tensor = alias

    def unpack(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self._tensor.dtype} that was saved is at version {self._tensor._version}; expected "
                f"version {self._version} instead. Hint: enable anomaly detection to find the operation that failed to "
                "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
            )
        if self._saved is None:
            return self._tensor
        storage, self._round = self._saved.within.back(self._saved, self._round)
        empty = torch.empty(0, dtype=self._dtype, device=self._tensor.device)
        return empty.set_(storage, self._offset, self._size, self._stride)


class SavedWrapper:
    """The graph's entry for a DTensor: its content, whose tensors are saved by themselves."""

    __slots__ = ("_inside", "_kind", "_meaning", "_size", "_stride")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], SavedTensor]) -> None:
        names, self._meaning = tensor.__tensor_flatten__()
        self._kind, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        values = ((name, getattr(tensor, name)) for name in names)
        self._inside = {name: pack(v) if isinstance(v, torch.Tensor) else v for name, v in values}

    def unpack(self) -> torch.Tensor:
        inside = {name: v.unpack() if isinstance(v, SavedTensor) else v for name, v in self._inside.items()}
        rebuilt: torch.Tensor = self._kind.__tensor_unflatten__(
            inside, self._meaning, self._size, self._stride
        )
        return rebuilt


class offload_activations(ContextDecorator):
    """Around a forward pass: what autograd saves for the backward pass leaves the device, and is back in time.

        with memopt.offload_activations():
            loss = loss_fn(model(x), y)
        loss.backward()

    or as a decorator of a forward function. Gradients are bit-equal. A saved storage leaves once, however many tensors
    of it were saved; parameters, and what lives on elsewhere, stay. So does what the backward pass wants first, at most
    `in_flight` bytes: with so few saved, nothing is copied. Copies run beside the computation, on streams of their own,
    and come back in the order of the backward pass; the host waits for no device. Tensors that were changed in place
    since are refused as autograd refuses them. With memopt.checkpoint and torch's, regions keep what they keep, and
    their inputs leave. In a CUDA graph's capture nothing leaves.

    min_size: storages of fewer bytes stay (int or "1MiB").
    to: "cpu", pinned memory beside a CUDA device: taken in the first step, kept for the next ones. Or a directory on a
    disk, for tensors on a CUDA device or the CPU: in a file without a name, of which nothing is left however the
    process ends.
    in_flight: bytes that may be on their way, and as many that stay at the end (int or text). Default: twice the
    largest storage. More hides copies behind longer stretches of computation; the peak grows by twice as much.
    host_memory: the most bytes of pinned memory that are taken in all; what finds no room there stays on the device,
    and a warning says so once. On the way back from a disk only what is wanted at once may take more.

    Raises ValueError for a size that is none, and OSError, naming the directory, where that is none, or at the next
    call when the disk is full or fails. Tensors on the CPU stay there under to="cpu", which a warning says once."""

    def __init__(
        self,
        min_size: int | str = "1MiB",
        to: str | os.PathLike[str] = "cpu",
        *,
        in_flight: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> None:
        self.min_size = _bytes(min_size)
        self.to = os.fspath(to)
        self.in_flight = None if in_flight is None else _bytes(in_flight)
        self.host_memory = None if host_memory is None else _bytes(host_memory)
        self._passes: list[
            tuple[SavedStorages, torch.autograd.graph.saved_tensors_hooks, DiskSpace | None]
        ] = []
        self._warned = False
        self._writes = WriteQueue()
        if self.to != "cpu" and not os.path.isdir(self.to):
            raise NotADirectoryError(
                errno.ENOTDIR, 'offload_activations: to= is "cpu" or a directory on a disk', self.to
            )
        self.last: SavedStorages | None = None  # bytes_out and bytes_in of the pass that ended last

    def __enter__(self) -> offload_activations:
        space = None if self.to == "cpu" else disk_space(self.to)
        saved = SavedStorages(partial(self._begin, space), self.in_flight)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packer(saved), methodcaller("unpack"))
        hooks.__enter__()
        self._passes.append((saved, hooks, space))
        return self

    def __exit__(self, *raised: Any) -> None:
        self.last, hooks, space = self._passes.pop()
        hooks.__exit__(*raised)
        try:
            self.last.ended()
        except OSError:
            if space is not None:
                give_up(space)
            if raised[0] is None:
                raise

    def _packer(self, storages: SavedStorages) -> Callable[[torch.Tensor], SavedTensor | SavedWrapper]:
        def pack(tensor: torch.Tensor) -> SavedTensor | SavedWrapper:
            if hasattr(tensor, "device_mesh") and not _is_a_parameters(tensor):
                return SavedWrapper(tensor, pack_plain)
            return pack_plain(tensor)

        def pack_plain(tensor: torch.Tensor) -> SavedTensor:
            if not self._can_go(tensor):
                return SavedTensor(tensor, None)
            stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
            packed = SavedTensor(tensor, storages.save(tensor, stream))
            storages.advance()
            return packed

        return pack

    def _can_go(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if _is_a_parameters(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.untyped_storage().nbytes() < max(self.min_size, 1):
            return False
        if not tensor.is_cuda and (self.to == "cpu" or tensor.device.type != "cpu"):
            self._warn_host(tensor)
            return False
        return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())

    def _begin(
        self, space: DiskSpace | None, saved: SavedStorage, flat: torch.Tensor
    ) -> StorageTransfer | None:
        transfer: StorageTransfer | None
        if space is None:
            room = host_memory(flat.device).take(saved.nbytes, self.host_memory)
            transfer = None if room is None else PinnedTransfer(flat, room, saved.stream)
        else:
            try:
                if not flat.is_cuda:
                    return DiskTransfer(flat, space.take(saved.nbytes))
                queued = 2 * saved.within.in_flight
                transfer = self._writes.begin(flat, space, saved.stream, queued, self.host_memory)
            except OSError:
                give_up(space)
                raise
        if transfer is None:
            self._warn_full(flat.device)
        return transfer

    def _warn_host(self, tensor: torch.Tensor) -> None:
        if not self._warned and tensor.device.type == "cpu" and not torch.cuda.is_initialized():
            self._warned = True
            warnings.warn(
                'offload_activations(to="cpu"): what is saved is in the host\'s memory already, so that nothing '
                "leaves; give the model a CUDA device, or to= a directory on a disk",
                stacklevel=2,
            )

    def _warn_full(self, device: torch.device) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "offload_activations: no more pinned memory than "
                f"{_C.format_size(host_memory(device).nbytes)} can be had (host_memory=, or the machine's); what does "
                "not fit in it stays on the device",
                stacklevel=2,
            )


def _is_a_parameters(tensor: torch.Tensor) -> bool:
    """Memory that lives on."""
    base = tensor if tensor._base is None else tensor._base
    return bool(base.is_leaf and base.requires_grad)


def _bytes(size: int | str) -> int:
    nbytes = _C.parse_size(size) if isinstance(size, str) else int(size)
    if nbytes < 0:
        raise ValueError(f"{size} bytes: a size cannot be negative")
    return nbytes
