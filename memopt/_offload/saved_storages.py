"""The storages that one forward pass saved for its backward pass: which are here, on their way, or away.

In the order in which they were saved last:

    first ─────────────────────────────────────────────────────────────► last
       away                        │ leaving        │ here
       the copy is over, and the   │ at most        │ at most `in_flight` bytes: what the backward
       device's memory is free     │ `in_flight`    │ pass wants first; never copied

A storage leaves when so much was saved behind it, if by then it is held for the backward pass alone; what lives on
elsewhere (an input, a buffer, a weight that autocast keeps) would be copied for nothing, and is asked again later. The
memory of the oldest that leaves is let go when its copy is over, by the order of streams; the host waits for nothing.

The backward pass wants them from the last to the first: when one is wanted, those before it begin to come, at most
`in_flight` bytes ahead."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from memopt._offload.transfers import StorageTransfer

ASKED_AGAIN = 4  # storages that live on elsewhere are asked again, so many each time that a tensor is saved


def uses_of(storage: int) -> int:
    """References that C++ holds to a storage; its Python object, once there is one, counts as torch counts it."""
    return int(torch._C._storage_Use_Count(storage))  # type: ignore[attr-defined]


@functools.cache
def uses_by_one() -> int:
    """uses_of() a storage that one tensor holds."""
    tensor = torch.empty(1)
    return uses_of(tensor.untyped_storage()._cdata)


class SavedStorage:
    """A storage, each once a pass, however many tensors of it were saved."""

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_cdata",
        "_flat",
        "_holder",
        "_left",
        "_storage",
        "_transfer",
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
        self.version, self.stream, self.within = tensor._version, stream, within
        self._transfer: StorageTransfer | None = None
        self._flat: torch.Tensor | None = None
        self._ahead = False  # fetched before it was wanted
        self.position = -1  # in the order of the pass
        self.tensors = 0  # saved of it; each is wanted once a round
        self.round, self._left = 0, 0

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of this storage, with what is in it since it was saved."""
        return self._storage() is tensor.untyped_storage() and self.version == tensor._version

    def one_more(self) -> int:
        """A tensor of it was saved. The round it is wanted in."""
        self.tensors += 1
        self._left += 1
        return self.round

    # ---- out ---------------------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        """Whether nobody but the backward pass holds the storage."""
        return uses_of(self._cdata) == uses_by_one()

    def whole(self) -> torch.Tensor | None:
        """The storage as bytes; None where it has changed since it was saved, and is no good to anybody."""
        assert self._holder is not None
        if self._holder._version != self.version:
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=self._holder.device)
        return flat.set_(self._holder.untyped_storage())

    def leave(self, transfer: StorageTransfer, flat: torch.Tensor) -> None:
        self._transfer, self._flat, self._holder = transfer, flat, None

    def settle(self) -> None:
        """The device's memory goes."""
        assert self._transfer is not None
        self._transfer.settle()
        self._flat = None

    # ---- back --------------------------------------------------------------------------------------------------------

    @property
    def away(self) -> bool:
        return self._transfer is not None and self._storage() is None

    @property
    def coming(self) -> bool:
        return self._ahead

    def fetch_ahead(self) -> None:
        assert self._transfer is not None
        self._transfer.fetch()
        self._ahead = True

    def advance(self) -> None:
        assert self._transfer is not None
        self._transfer.advance()

    def back(self, wanted_in: int) -> tuple[torch.UntypedStorage, int]:
        """The storage, and the round in which the tensor is wanted next. wanted_in: that in which it is wanted now."""
        storage = self._storage()
        if storage is None:
            assert self._transfer is not None
            storage = self._transfer.back().untyped_storage()
            self._storage = weakref.ref(storage)
            if self._ahead:
                self._ahead = False
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
        if getattr(self, "_ahead", False):
            self.within.wanted(self)


def _nowhere(saved: SavedStorage, flat: torch.Tensor) -> None:
    """Nothing leaves once the pass is over."""


class SavedStorages:
    """Those of one pass.

    begin: begins the copy of a storage, or None where there is no room for it. in_flight: bytes, None for twice the
    largest storage."""

    def __init__(
        self,
        begin: Callable[[SavedStorage, torch.Tensor], StorageTransfer | None],
        in_flight: int | None,
    ) -> None:
        self._begin, self._in_flight = begin, in_flight
        self._largest = 0
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

    @property
    def in_flight(self) -> int:
        return 2 * self._largest if self._in_flight is None else self._in_flight

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
            if saved.position >= 0:
                self._order[saved.position] = None
            saved.position = len(self._order)
            self._order.append(weakref.ref(saved))
            self._next = saved.position
            return saved

    def advance(self) -> None:
        """Lets go what is due. After save(), once its caller no longer holds the tensor."""
        with self._lock:
            for _ in range(min(ASKED_AGAIN, len(self._elsewhere))):
                self._leave(self._elsewhere.popleft())
            while self._here_bytes > self.in_flight:
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
        """The forward pass is over: what has not begun to leave stays. The first error, once all is settled."""
        failure = None
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
        """One that was fetched ahead is wanted now, or nobody will want it."""
        with self._lock:
            self._coming_bytes -= saved.nbytes
            while self._coming and ((oldest := self._coming[0]()) is None or not oldest.coming):
                self._coming.popleft()
