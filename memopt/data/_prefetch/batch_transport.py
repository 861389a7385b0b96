"""A batch's way to the device that uses it.

To a CUDA device a batch begins its way when it is sent, and is awaited, and widened, when it arrives. All order is kept
by the streams, so that the host waits for nothing but room in pinned memory:

    send     memory is taken from the present stream, `home`. The copy begins once all is done that home was given
             before: whatever had that memory last. It runs beside what home is given afterwards. All tensors of a batch
             go in one call (_C.copy_batch), in order with home once and not each.
    arrive   what the present stream is given afterwards comes after the copy. So the memory needs no record_stream,
             and is home's again the moment the program lets go of it, under any allocator; only where another stream
             than home uses the batch does the allocator have to be told.
    widen    on the present stream, when it arrives: until then a batch is as small as it came. The narrow tensors'
             memory is home's again at once.

A tensor that is pinned is copied from where it lies, any other by way of pinned memory. What has a method `to` of its
own goes by that, on home: in order, but not beside anything.

A batch is looked at once (once more before, where it is widened): a mapping may make its tensors at each access.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

from memopt import _C
from memopt._offload.pinned_memory import ALIGNED, pinned_tensor
from memopt._runtime.log import logger
from memopt.data._prefetch.dequantize import Widening

_APART = 64  # bytes: from multiples of it on _C.copy_batch puts tensors into a batch's pinned memory
# Those that _C.copy_batch can read by DLPack, of every torch that memopt runs on. Of others it is given the bytes.
_READABLE = frozenset(
    getattr(torch, name)
    for name in (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    ).split()
)


class ToCpu:
    """A transport to the CPU, which copies nothing."""

    ahead = False  # whether it is of use to send a batch before it is wanted

    def __init__(self, widening: Widening | None) -> None:
        self.widening = widening

    def send(self, batch: Any) -> _Here:
        narrow = _narrow_paths(batch, self.widening)
        return _Here(
            map_leaves(batch, lambda _, leaf: _moved(leaf, torch.device("cpu"))), narrow, self.widening
        )


class _Here:
    def __init__(self, batch: Any, narrow: frozenset[str], widening: Widening | None) -> None:
        self._batch, self._narrow, self._widening = batch, narrow, widening

    def arrive(self) -> Any:
        return _widened(self._batch, self._narrow, self._widening)


class ToCuda:
    """device: with an index. depth: batches that will be on their way at once."""

    ahead = True

    def __init__(self, device: torch.device, depth: int, widening: Widening | None) -> None:
        assert device.index is not None
        torch.cuda.init()  # torch's own error where there is no CUDA, before stream() asks for more
        self.device, self.index, self.depth, self.widening = device, int(device.index), depth, widening
        self.memory = batch_memory(device)

    def send(self, batch: Any) -> _OnItsWay:
        """Begin the copy of a batch. After an error nothing is still read or written."""
        narrow = _narrow_paths(batch, self.widening)
        if not torch.is_inference_mode_enabled():
            return _OnItsWay(self, batch, narrow)
        with torch.inference_mode(False):  # what is made in inference mode could not be trained on after it
            return _OnItsWay(self, batch, narrow)

    def stream(self) -> int:
        """Return the current stream's address.

        torch.cuda.current_stream() takes twenty times as long, twice a batch."""
        return int(torch._C._cuda_getCurrentRawStream(self.index))  # type: ignore[attr-defined]


class _OnItsWay:
    _ticket, _awaited = 0, False

    def __init__(self, transport: ToCuda, batch: Any, narrow: frozenset[str]) -> None:
        self._transport, self._narrow = transport, narrow
        device = transport.device
        # By the id of a leaf that is kept here, since it may have been made for this one look.
        moved: dict[int, tuple[Any, Any]] = {}
        hosts: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []

        def move(_: str, leaf: Any) -> Any:
            if (found := moved.get(id(leaf))) is not None:
                return found[1]
            if _C.plain_bytes(leaf) and not leaf.requires_grad:  # nearly every one, and they may be many
                there = torch.empty_like(leaf, device=device)
                hosts.append(leaf)
                targets.append(there)
            elif _is_plain(leaf):
                there = torch.empty_like(leaf, device=device)
                host, target = _pair(leaf, there)
                hosts.append(host)
                targets.append(target)
            else:
                with torch.no_grad():
                    there = _moved(leaf, device)
            moved[id(leaf)] = leaf, there
            return there

        self._batch = map_leaves(batch, move)
        self._home = transport.stream()  # after the first use of the device
        if hosts:
            self._copy(hosts, targets)
        by_methods = len(moved) > len(hosts)
        self._begun = torch.cuda.current_stream(device).record_event() if by_methods else None
        self._moved = [there for _, there in moved.values()]

    def _copy(self, hosts: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        memory = self._transport.memory
        pinned = bytes([host.is_pinned() for host in hosts])
        total = 0
        for host, lies in zip(hosts, pinned, strict=True):
            if not lies:
                total += -(-host.nbytes // _APART) * _APART
        with memory.lock:
            slot = memory.take(total, self._transport.depth)
            if total and slot is None:
                hosts, targets = _without(pinned, hosts, targets)
                pinned = b"\1" * len(hosts)
            room = None if slot is None else slot.room
            self._ticket = _C.copy_batch(hosts, targets, pinned, room, self._home)
            if self._ticket:
                # The rest lies in the room, whoever has it now.
                read = [host for host, lies in zip(hosts, pinned, strict=True) if lies] if any(pinned) else ()
                memory.hold(self._ticket, (slot, read))

    def arrive(self) -> Any:
        """Return the batch, for the current stream. After an error the call may be repeated."""
        transport = self._transport
        user = transport.stream()
        _C.copy_await(transport.index, self._ticket, user)
        if user != self._home:
            self._lend(torch.cuda.current_stream(transport.device))
        self._awaited = True
        return _widened(self._batch, self._narrow, transport.widening)

    def _lend(self, user: torch.cuda.Stream) -> None:
        """Lend the memory to a stream that does not own it."""
        if self._begun is not None:
            user.wait_event(self._begun)
        for one in self._moved:
            if callable(record := getattr(one, "record_stream", None)):
                record(user)

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if self._ticket and not self._awaited and not sys.is_finalizing():
            _C.copy_await(self._transport.index, self._ticket, self._home)


Transport = ToCpu | ToCuda
Sent = _Here | _OnItsWay


# ---- leaves ---------------------------------------------------------------------------------------------------------


def _is_plain(leaf: Any) -> bool:
    """Return whether it is a tensor whose bytes are all there is to it."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_neg() or leaf.is_conj())
        and leaf.numel() > 0
    )


def _moved(leaf: Any, device: torch.device) -> Any:
    """Move a leaf by its own method, on the current stream."""
    if isinstance(leaf, torch.Tensor) and leaf.device == device:
        return leaf
    if device.type == "cuda" and callable(pin := getattr(leaf, "pin_memory", None)) and _is_on_cpu(leaf):
        leaf = pin()
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)


def _is_on_cpu(leaf: Any) -> bool:
    """Return whether the leaf is on the CPU, as far as it says."""
    return (
        str(getattr(leaf, "device", "cpu")) == "cpu" and getattr(leaf, "layout", None) is not torch.sparse_coo
    )


def _without(
    pinned: bytes, hosts: list[torch.Tensor], targets: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the pinned tensors and their targets.

    The others are copied on the current stream, for which the host waits."""
    left: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for host, there, lies in zip(hosts, targets, pinned, strict=True):
        if lies:
            left[0].append(host)
            left[1].append(there)
        else:
            there.copy_(host)
    return left


def _pair(leaf: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as _C.copy_batch takes them."""
    if not leaf.is_contiguous() and leaf.stride() != there.stride():
        leaf = leaf.clone()  # it had gaps, or one number in several places
    return (leaf, there) if leaf.dtype in _READABLE else (_bytes_of(leaf), _bytes_of(there))


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=dense.device)
    return flat.set_(dense.untyped_storage(), dense.storage_offset() * dense.itemsize, (dense.nbytes,))


# ---- widening -------------------------------------------------------------------------------------------------------


def _narrow_paths(batch: Any, widening: Widening | None) -> frozenset[str]:
    """Return the paths of the leaves to widen, after checking all of them."""
    if widening is None:
        return frozenset()
    leaves: dict[str, Any] = {}
    map_leaves(batch, lambda path, leaf: leaves.setdefault(path, leaf))
    if missing := widening.missing(leaves):
        there = ", ".join(f"{path!r} ({_described(leaf)})" for path, leaf in leaves.items())
        raise ValueError(f"widen={missing[0]!r} is not in this batch, which has {there or 'no tensors'}")
    narrow = frozenset(path for path, leaf in leaves.items() if widening.applies(path, leaf))
    for path in narrow:
        widening.check(path, leaves[path])
    return narrow


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return type(leaf).__qualname__


def _widened(batch: Any, narrow: frozenset[str], widening: Widening | None) -> Any:
    if widening is None or not narrow:
        return batch
    wide: dict[int, tuple[Any, torch.Tensor]] = {}  # by the id of a leaf that is kept here

    def widen(path: str, leaf: Any) -> Any:
        if path not in narrow:
            return leaf
        if id(leaf) not in wide:
            wide[id(leaf)] = leaf, widening(leaf)
        return wide[id(leaf)][1]

    with torch.inference_mode(False), torch.no_grad():
        return map_leaves(batch, widen)


# ---- pinned memory ---------------------------------------------------------------------------------------------------
# Pinned host memory in which batches wait for their copy to a CUDA device, and what else must be left as it is until a
# copy is over.
#
# It is a ring (csrc/transfer/ring.h) of exactly as many bytes as `depth` batches take, pinned when the first one comes.
# A slot is given back once its copy is over, so the host waits where it is `depth` copies ahead of the device: that is
# the bound. Batches that grow have a larger ring, by an eighth more than is asked for, and the old one goes when
# nothing lies in it any more.
#
# A batch that comes pinned takes no slot, and the host waits for none: it is kept until its copy is over, and let go
# when the next batch is sent. So there are as many of them as the host is ahead of the device.
#
# All prefetchers of a device have one, which goes with the last of them.


_PATIENCE = 0.1  # seconds of a wait in C: then Python's signal handlers have their turn


class RingSlot:
    """Bytes of a ring's memory, until nothing refers to this; room: (memory, begin, end)."""

    __slots__ = ("_number", "_ring", "room")

    def __init__(self, ring: _C.Ring, number: int, room: tuple[torch.Tensor, int, int]) -> None:
        self._ring, self._number, self.room = ring, number, room

    def __del__(self) -> None:
        self._ring.give(self._number, 0)


class BatchMemory:
    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.device, self._index = device, int(device.index)
        self.lock = threading.RLock()  # held from take() until what is read is held
        self._pieces: list[tuple[torch.Tensor, _C.Ring]] = []  # the last one is in use
        self._flying: deque[tuple[int, object]] = deque()  # tickets, and what they read
        self._refused = False

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned, used or not."""
        return sum(ring.held()[2] for _, ring in self._pieces)

    def take(self, nbytes: int, depth: int) -> RingSlot | None:
        """Room for a batch, of which there will be `depth` at once. Waits for older copies. None where the batch needs
        none (nbytes is 0: all of it is pinned already), or the host can pin nothing. In any case what belongs to
        copies that are over is let go."""
        slot = -(-nbytes // ALIGNED) * ALIGNED
        with self.lock:
            self.settle()
            if not nbytes:
                return None
            if not self._pieces or self._pieces[-1][0].numel() < (slot if self._refused else depth * slot):
                self._grow(slot, depth)
            while self._pieces and self._pieces[-1][0].numel() >= slot:
                memory, ring = self._pieces[-1]
                if found := ring.take(nbytes):
                    number, begin, _ = found
                    return RingSlot(ring, number, (memory, begin, begin + nbytes))
                self._wait_for_oldest()
            return None

    def hold(self, ticket: int, what: object) -> None:
        """Keep the object until the copy is over."""
        with self.lock:
            self._flying.append((ticket, what))

    def settle(self) -> None:
        """Release the memory of copies that are over."""
        with self.lock:
            while self._flying and _C.copy_over(self._index, self._flying[0][0]):
                self._flying.popleft()
            if len(self._pieces) > 1:
                *old, last = self._pieces
                self._pieces = [*(piece for piece in old if piece[1].held()[0]), last]

    def _wait_for_oldest(self) -> None:
        assert self._flying, "room is taken that no copy reads"
        self._wait(self._flying[0][0])
        self.settle()

    def _wait(self, ticket: int) -> None:
        while not _C.copy_wait(self._index, ticket, _PATIENCE):
            pass

    def _grow(self, slot: int, depth: int) -> None:
        """Make a ring for `depth` slots; for fewer if the host cannot pin as many."""
        whole = depth * slot
        if self._pieces:
            whole += -(-whole // 8 // ALIGNED) * ALIGNED
        for size in (whole, depth * slot, slot):
            if self._pieces and size <= self._pieces[-1][0].numel():
                return
            try:
                memory = pinned_tensor(self.device, size)
            except MemoryError:
                continue
            self._pieces.append((memory, _C.Ring(size, ALIGNED)))
            break
        if self.nbytes < depth * slot and not self._refused:
            self._refused = True
            logger.warning(
                "Prefetcher: the host cannot pin %d bytes for %d batches (%d are pinned): some or all of their "
                "copies do not overlap the step. Free host memory, raise the limit of locked memory, or use a "
                "smaller depth",
                depth * slot,
                depth,
                self.nbytes,
            )

    def __del__(self) -> None:
        # Tensors that torch has pinned must not be another's while they are read. (Giving back ours waits by itself.)
        if not sys.is_finalizing() and getattr(self, "_flying", None):
            self._wait(self._flying[-1][0])


_memories: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()


def batch_memory(device: torch.device) -> BatchMemory:
    """Return the memory of all prefetchers to that device, whose index is given."""
    assert device.index is not None
    found = _memories.get(device.index)
    if found is None:
        found = _memories[device.index] = BatchMemory(device)
    return found


# ---- nested batches --------------------------------------------------------------------------------------------------
# Leaves of a batch: its tensors, and objects that go to a device by a method of their own, however they are nested.
#
# Containers are dicts and other mappings, tuples and named tuples, lists and other sequences that can be written to,
# and dataclasses. A container in which nothing changes is given back as it is; what holds no tensor is left alone.


_PLAIN = (str, bytes, int, float, complex, type(None))


def moves_itself(value: object) -> bool:
    """Return whether it goes to a device by its method `to`. A mapping does only if it can be pinned too: the others'
    `to` is that of all their values (Hugging Face's BatchEncoding), which are better moved one by one."""
    if isinstance(value, type) or not callable(getattr(value, "to", None)):
        return False
    return not isinstance(value, Mapping) or callable(getattr(value, "pin_memory", None))


def map_leaves(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The batch with change(path, leaf) in the place of each leaf: a tensor or what moves itself. path: the keys,
    indices and field names that lead there, with dots between; a batch that is itself a leaf has "". One that is met
    twice is asked for twice."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor) or moves_itself(value):
        return change(path, value)
    if isinstance(value, Mapping):
        return _mapping(value, _changed(value.items(), change, path))
    if isinstance(value, tuple):
        found = _changed(enumerate(value), change, path)
        return _tuple(value, found) if found else value
    if isinstance(value, MutableSequence) and not isinstance(value, bytearray):
        return _written(value, _changed(enumerate(value), change, path))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _dataclass(value, _changed(((name, getattr(value, name)) for name in names), change, path))
    return value


def _changed(
    items: Iterable[tuple[Any, Any]], change: Callable[[str, Any], Any], path: str
) -> dict[Any, Any]:
    """Return the items that are another object after the change."""
    before = f"{path}." if path else ""
    found = {}
    for key, value in items:
        new = map_leaves(value, change, f"{before}{key}")
        if new is not value:
            found[key] = new
    return found


def _mapping(value: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
    if not found:
        return value
    if type(value) is dict:
        return {**value, **found}
    if isinstance(value, MutableMapping):
        return _written(value, found)
    return type(value)({**value, **found})  # type: ignore[call-arg]


def _tuple(value: tuple[Any, ...], found: dict[int, Any]) -> Any:
    new = [found.get(i, old) for i, old in enumerate(value)]
    make = getattr(value, "_make", None)  # of named tuples
    return make(new) if make is not None else type(value)(new)


def _written(value: Any, found: dict[Any, Any]) -> Any:
    if found:
        value = copy.copy(value)
        for key, new in found.items():
            value[key] = new
    return value


def _dataclass(value: Any, found: dict[str, Any]) -> Any:
    if found:
        value = copy.copy(value)
        for name, new in found.items():
            object.__setattr__(value, name, new)  # frozen ones, too
    return value
