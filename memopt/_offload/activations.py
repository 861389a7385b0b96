"""memopt.offload_activations: what a forward pass saves for its backward pass waits on the host, on a disk, or coded.

The storages that one pass saved are here, on their way, or away. In the order in which they were saved last:

    first ─────────────────────────────────────────────────────────────► last
       away                        │ leaving        │ here
       the copy is over, and the   │ at most        │ at most `keep` bytes: what the backward
       device's memory is free     │ `in_flight`    │ pass wants first; never copied

A storage leaves when so much was saved behind it, if by then it is held for the backward pass alone; what lives on
elsewhere (an input, a buffer, a weight that autocast keeps) would be copied for nothing, and is asked again later. The
memory of the oldest that leaves is let go when its copy is over, by the order of streams; the host waits for nothing.

The backward pass wants them from the last to the first: when one is wanted, those before it begin to come, at most
`in_flight` bytes ahead. Codes of 8 bits (codes.py) are made and read in the computation's own order: nothing is in
flight."""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from memopt import _C
from memopt._offload.codes import EIGHT_BITS, CodedTransfer, can_code
from memopt._offload.pinned_memory import host_memory
from memopt._offload.transfers import (
    DiskSpace,
    DiskTransfer,
    PinnedTransfer,
    StorageTransfer,
    WriteQueue,
    can_go,
    disk_space,
    give_up,
    uses_by_one,
    uses_of,
)
from memopt._runtime import arguments

ASKED_AGAIN = 4  # storages that live on elsewhere are asked again, so many each time that a tensor is saved


class offload_activations(ContextDecorator):
    """A context for a forward pass that moves what autograd saves off the device until the backward pass needs it.

    It can also decorate a forward function. Gradients are bit-equal, unless to="8bit". A saved storage is copied once,
    however many tensors of it were saved. Parameters, and tensors that live on elsewhere, stay on the device. So do the
    tensors that the backward pass needs first, up to `keep` bytes: if no more than that is saved, nothing is copied.
    Copies overlap with the computation, on streams of their own, and come back in the order of the backward pass; the
    host waits for no device. Tensors that have been changed in place since are refused, as autograd refuses them. Under
    memopt.checkpoint and torch's, regions keep what they keep, and their inputs are offloaded. During a CUDA graph's
    capture nothing is offloaded. Under to="cpu", tensors on the CPU stay there, and a warning says so once.

    Args:
        min_size: Smaller storages stay on the device (bytes or "1MiB").
        to: "cpu": pinned memory for a CUDA device, allocated in the first step and kept for the next ones. Or a
            directory on a disk, for tensors on a CUDA device or the CPU: an unnamed file, of which nothing is left
            however the process ends. Or "8bit", for tensors on a CUDA device or the CPU: storages in fp32, fp16 or bf16
            stay there as codes of 8 bits, a quarter or half of their size, by blockwise quantization: 256 elements have
            a scale, and an error of at most 1/253 of the largest of them (and their dtype's own rounding). Gradients
            change by that; the computation waits for coding and decoding. Others stay as they are: integers, storages
            of which tensors of several dtypes were saved, and those of 1/32 of the largest or less, such as attention's
            logsumexp. Zeros, and no others, come back as zeros; -inf is exact; a block with other infinities or NaN
            comes back without a finite value. A function that divides by what it saved, such as log(), is wrong where
            that is small beside its block's largest: call it outside.
        in_flight: The most bytes that may be in transfer at once (bytes or text). By default twice the largest storage.
            A larger value hides copies behind longer stretches of computation; the peak grows by as much, and by twice
            as much without `keep`.
        keep: The most bytes that stay on the device when the forward pass ends (bytes or text), by default `in_flight`,
            and with "8bit" nothing. A larger value copies less; the peak grows by as much.
        host_memory: The most bytes of pinned memory in all. Storages beyond it stay on the device, and a warning says
            so once. On the way back from a disk, storages that are needed at once may take more.

    Raises:
        ValueError: A size is not valid; or in_flight or host_memory is given with to="8bit", which transfers nothing.
        OSError: `to` is not a directory; or, at the next call, the disk is full or fails. The error names the
            directory.

    Examples:
        >>> with memopt.offload_activations():
        ...     loss = loss_fn(model(x), y)
        >>> loss.backward()
        >>> with memopt.offload_activations(to="8bit"):
        ...     loss = loss_fn(model(x), y)
    """

    def __init__(
        self,
        min_size: int | str = "1MiB",
        to: str | os.PathLike[str] = "cpu",
        *,
        in_flight: int | str | None = None,
        keep: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> None:
        self.min_size = arguments.size(min_size, "min_size")
        self.to = os.fspath(to)
        self.in_flight = None if in_flight is None else arguments.size(in_flight, "in_flight")
        self.keep = None if keep is None else arguments.size(keep, "keep")
        self.host_memory = None if host_memory is None else arguments.size(host_memory, "host_memory")
        self._passes: list[
            tuple[SavedStorages, torch.autograd.graph.saved_tensors_hooks, DiskSpace | None]
        ] = []
        self._warned = False
        self._writes = WriteQueue()
        if self.to == EIGHT_BITS:
            if in_flight is not None or host_memory is not None:
                raise ValueError(
                    'offload_activations: in_flight= and host_memory= are for copies, and to="8bit" makes none: leave '
                    "them out; keep= is what stays as it is"
                )
            self.in_flight = 0
        elif self.to != "cpu" and not os.path.isdir(self.to):
            raise NotADirectoryError(
                errno.ENOTDIR,
                'offload_activations: to= must be "cpu", "8bit" or a directory on a disk',
                self.to,
            )
        self.last: SavedStorages | None = None  # bytes_out and bytes_in of the pass that ended last

    def __enter__(self) -> offload_activations:
        space = None if self.to in ("cpu", EIGHT_BITS) else disk_space(self.to)
        saved = self._new_pass(space)
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

    def _new_pass(self, space: DiskSpace | None) -> SavedStorages:
        return SavedStorages(partial(self._begin, space), self.in_flight, self.keep)

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
        if not can_go(tensor, self.min_size) or _is_a_parameters(tensor):
            return False
        if self.to == "cpu" and not tensor.is_cuda:
            self._warn_host()
            return False
        return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())

    def _begin(
        self, space: DiskSpace | None, saved: SavedStorage, flat: torch.Tensor
    ) -> StorageTransfer | None:
        transfer: StorageTransfer | None
        if self.to == EIGHT_BITS:
            if saved.dtype is None or not can_code(saved.dtype, saved.nbytes, saved.within.largest_alone):
                return None
            return CodedTransfer(flat.view(saved.dtype), saved.stream)
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

    def _warn_host(self) -> None:
        if not self._warned and not torch.cuda.is_initialized():
            self._warned = True
            warnings.warn(
                'offload_activations(to="cpu"): saved tensors are in the host\'s memory already, so nothing '
                "is offloaded; move the model to a CUDA device, or pass a directory on a disk as to=",
                stacklevel=2,
            )

    def _warn_full(self, device: torch.device) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"offload_activations: no more than {_C.format_size(host_memory(device).nbytes)} of pinned memory is "
                "available (host_memory=, or the machine's); tensors that do not fit stay on the device",
                stacklevel=2,
            )


class OffloadedCalls(offload_activations):
    """A context for each of several calls whose outputs have one backward pass, such as an actor's and its critics'.

    What one call saved last may leave while the next one runs. The forward pass ends with the first tensor that the
    backward pass wants, or before a module is called again: what no backward pass follows is not held for longer."""

    def __init__(self, keep: int | None = None, to: str = "cpu") -> None:
        super().__init__(keep=keep, to=to)
        self._shared: SavedStorages | None = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def of(self, module: torch.nn.Module) -> OffloadedCalls:
        if self._shared is not None and (self._shared.over or module in self._called):
            self._end()
        self._called.add(module)
        return self

    def _new_pass(self, space: DiskSpace | None) -> SavedStorages:
        if self._shared is None:
            self._shared = super()._new_pass(space)
            self._shared.ends_when_wanted = True
        return self._shared

    def _end(self) -> None:
        if self._shared is not None:
            self._shared.ended()
        self._shared = None
        self._called.clear()

    def __exit__(self, *raised: Any) -> None:
        self.last, hooks, _ = self._passes.pop()
        hooks.__exit__(*raised)
        if raised[0] is not None:
            self._end()


def _is_a_parameters(tensor: torch.Tensor) -> bool:
    """Return whether the memory is a parameter's, which lives on."""
    base = tensor if tensor._base is None else tensor._base
    return bool(base.is_leaf and base.requires_grad)


# ---- the graph's entries ---------------------------------------------------------------------------------------------


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


# ---- storages of a pass ----------------------------------------------------------------------------------------------


class SavedStorage:
    """A storage, each once a pass, however many tensors of it were saved."""

    __slots__ = (
        "__weakref__",
        "_cdata",
        "_flat",
        "_holder",
        "_left",
        "_storage",
        "_transfer",
        "coming",
        "dtype",
        "nbytes",
        "position",
        "round",
        "stream",
        "tensors",
        "version",
        "within",
    )

    def __init__(self, tensor: torch.Tensor, within: SavedStorages, stream: int) -> None:
        storage = tensor.untyped_storage()
        self._holder: torch.Tensor | None = (
            tensor.detach()
        )  # holds the storage; counts versions with the tensor's own
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        self._storage = weakref.ref(storage)
        self._cdata, self.nbytes = storage._cdata, storage.nbytes()
        self.dtype: torch.dtype | None = tensor.dtype  # of the tensors that were saved of it; None of several
        self.version, self.stream, self.within = tensor._version, stream, within
        self._transfer: StorageTransfer | None = None
        self._flat: torch.Tensor | None = None
        self.coming = False  # fetched before it was wanted
        self.position = -1  # in the order of the pass
        self.tensors = 0  # saved of it; each is wanted once a round
        self.round, self._left = 0, 0

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on this storage and has not been changed since it was saved."""
        return self._storage() is tensor.untyped_storage() and self.version == tensor._version

    def one_more(self) -> int:
        """Note that another tensor of the storage was saved, and return the round in which it is needed."""
        self.tensors += 1
        self._left += 1
        return self.round

    # ---- out ---------------------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        """Return whether nobody but the backward pass holds the storage."""
        return uses_of(self._cdata) == uses_by_one()

    def whole(self) -> torch.Tensor | None:
        """Return the storage as bytes; None if it has changed since it was saved, because it is then of no use."""
        assert self._holder is not None
        if self._holder._version != self.version:
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=self._holder.device)
        return flat.set_(self._holder.untyped_storage())

    def leave(self, transfer: StorageTransfer, flat: torch.Tensor) -> None:
        self._transfer, self._flat, self._holder = transfer, flat, None

    def settle(self) -> None:
        """Free the device's memory."""
        assert self._transfer is not None
        self._transfer.settle()
        self._flat = None

    # ---- back --------------------------------------------------------------------------------------------------------

    @property
    def away(self) -> bool:
        return self._transfer is not None and self._storage() is None

    def fetch_ahead(self) -> None:
        assert self._transfer is not None
        self._transfer.fetch()
        self.coming = True

    def advance(self) -> None:
        assert self._transfer is not None
        self._transfer.advance()

    def back(self, wanted_in: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage, and the round in which the tensor is needed next.

        wanted_in: the round in which it is needed now."""
        storage = self._storage()
        if storage is None:
            assert self._transfer is not None
            storage = self._transfer.back().untyped_storage()
            self._storage = weakref.ref(storage)
            if self.coming:
                self.coming = False
                self.within.wanted(self)
        elif self._transfer is not None:  # somebody has it, maybe for another stream
            self._transfer.join(storage)
        if wanted_in == self.round:
            self._left -= 1
            if not self._left:  # each tensor had it: the memory lives as long as they do
                self.round, self._left = self.round + 1, self.tensors
                if self._transfer is not None:
                    self._transfer.forget()
            return storage, wanted_in + 1
        return storage, wanted_in

    def __del__(self) -> None:
        if getattr(self, "coming", False):
            self.within.wanted(self)


def _nowhere(saved: SavedStorage, flat: torch.Tensor) -> None:
    """Begin no copy, because the pass is over."""


class SavedStorages:
    """The saved storages of one pass.

    begin: begins the copy of a storage, or returns None if there is no room for it. in_flight: bytes, None for twice
    the largest storage. keep: bytes, None for as many."""

    def __init__(
        self,
        begin: Callable[[SavedStorage, torch.Tensor], StorageTransfer | None],
        in_flight: int | None,
        keep: int | None,
    ) -> None:
        self._begin, self._in_flight, self._keep = begin, in_flight, keep
        self._largest = self.largest_alone = 0  # bytes of a storage; of one that has left, or would have
        self._known: dict[int, SavedStorage] = {}  # by the storage's address in C++; while the pass lasts
        self._here: dict[SavedStorage, None] = {}  # in the order of saving
        self._elsewhere: deque[SavedStorage] = deque()  # held by others when it was their turn
        self._leaving: deque[SavedStorage] = deque()
        self._here_bytes = self._leaving_bytes = self._coming_bytes = 0
        self._coming: deque[weakref.ref[SavedStorage]] = deque()
        self._order: list[weakref.ref[SavedStorage] | None] = []
        self._next = -1  # what is fetched next
        self._lock = threading.RLock()  # backward passes run on threads of their own, one a device
        self.bytes_out = self.bytes_in = 0
        self.over, self.ends_when_wanted = False, False

    @property
    def in_flight(self) -> int:
        return 2 * self._largest if self._in_flight is None else self._in_flight

    @property
    def keep(self) -> int:
        return self.in_flight if self._keep is None else self._keep

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor, stream: int) -> SavedStorage:
        with self._lock:
            cdata = tensor.untyped_storage()._cdata
            saved = self._known.get(cdata)
            if saved is None or not saved.is_of(tensor):
                saved = self._known[cdata] = SavedStorage(tensor, self, stream)
                self._largest = max(self._largest, saved.nbytes)
                self._here[saved] = None
                self._here_bytes += saved.nbytes
            elif saved in self._here:  # now the last
                self._here[saved] = self._here.pop(saved)
            if saved.dtype != tensor.dtype:
                saved.dtype = None
            if saved.position >= 0:
                self._order[saved.position] = None
            saved.position = len(self._order)
            self._order.append(weakref.ref(saved))
            self._next = saved.position
            return saved

    def advance(self) -> None:
        """Begin the copies that are due. Called after save(), when its caller no longer holds the tensor."""
        with self._lock:
            for _ in range(min(ASKED_AGAIN, len(self._elsewhere))):
                self._leave(self._elsewhere.popleft())
            while self._here_bytes > self.keep:
                saved = next(iter(self._here))
                del self._here[saved]
                self._here_bytes -= saved.nbytes
                self._leave(saved)
            while self._leaving_bytes > self.in_flight:
                self._settle()

    def _leave(self, saved: SavedStorage) -> None:
        if not saved.alone():
            self._elsewhere.append(saved)
            return
        self.largest_alone = max(self.largest_alone, saved.nbytes)
        flat = saved.whole()
        transfer = None if flat is None else self._begin(saved, flat)
        if flat is None or transfer is None:
            return  # it stays, as it is
        saved.leave(transfer, flat)
        self.bytes_out += saved.nbytes
        self._leaving.append(saved)
        self._leaving_bytes += saved.nbytes

    def _settle(self) -> None:
        saved = self._leaving.popleft()
        self._leaving_bytes -= saved.nbytes
        saved.settle()

    def ended(self) -> None:
        """End the forward pass: storages that have not begun to leave stay.

        Raises the first error, once everything is settled."""
        failure, self.over = None, True
        with self._lock:
            self._known.clear()
            self._here.clear()
            self._elsewhere.clear()
            self._begin = _nowhere  # who asks what the pass was does not hold its file
            while self._leaving:
                try:
                    self._settle()
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def back(self, saved: SavedStorage, wanted_in: int) -> tuple[torch.UntypedStorage, int]:
        with self._lock:
            if self.ends_when_wanted and not self.over:
                self.ended()
            if saved.away:
                if not saved.coming:
                    self.bytes_in += saved.nbytes
                    self._next = saved.position - 1  # the backward pass begins, or goes another way
                storage, wanted_in = saved.back(wanted_in)
            else:
                storage, wanted_in = saved.back(wanted_in)
                self._next = min(self._next, saved.position - 1)
            self._fetch_ahead()
            return storage, wanted_in

    def _fetch_ahead(self) -> None:
        try:
            for fetched in self._coming:
                coming = fetched()
                if coming is not None and coming.coming:
                    coming.advance()
        except (torch.OutOfMemoryError, MemoryError):
            return  # none is wanted yet: then there may be room
        while self._next >= 0:
            reference = self._order[self._next]
            saved = None if reference is None else reference()
            if saved is not None and saved.away and not saved.coming:
                if self._coming_bytes + saved.nbytes > self.in_flight:
                    return
                try:
                    saved.fetch_ahead()
                except (torch.OutOfMemoryError, MemoryError):
                    return  # not wanted yet: then there may be room
                self._coming.append(weakref.ref(saved))
                self._coming_bytes += saved.nbytes
                self.bytes_in += saved.nbytes
            self._next -= 1

    def wanted(self, saved: SavedStorage) -> None:
        """Note that a prefetched storage is needed now, or is no longer needed."""
        with self._lock:
            self._coming_bytes -= saved.nbytes
            while self._coming and ((oldest := self._coming[0]()) is None or not oldest.coming):
                self._coming.popleft()
