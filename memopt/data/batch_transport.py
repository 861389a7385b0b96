"""A batch's way to the device that uses it.

To a CUDA device a batch begins its way when it is sent, and is awaited, and widened, when it arrives. All order is kept
by the streams, so that the host waits for nothing but room in pinned memory (batch_memory.py):

    send     memory is taken from the present stream, `home`. The copies begin once all is done that home was given
             before: whatever had that memory last. They run beside what home is given afterwards.
    arrive   what the present stream is given afterwards comes after the copies. So the memory needs no record_stream,
             and is home's again the moment the program lets go of it, under any allocator; only where another stream
             than home uses the batch does the allocator have to be told.
    widen    on the present stream, when it arrives: until then a batch is as small as it came. The narrow tensors'
             memory is home's again at once.

A tensor that is pinned is copied from where it lies, any other by way of pinned memory. What has a method `to` of its
own goes by that, on home: in order, but not beside anything."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from memopt import _C
from memopt.data.batch_memory import batch_memory
from memopt.data.batch_tree import mapped
from memopt.data.widening import Widening
from memopt.offloading.host_memory import Room

_APART = 64  # bytes: tensors begin at multiples of it in a batch's pinned memory


class Sent(Protocol):
    def arrive(self) -> Any: ...


class Transport(Protocol):
    ahead: bool  # whether it is of use to send a batch before it is wanted

    def send(self, batch: Any) -> Sent: ...


class ToCpu:
    """Nothing travels."""

    ahead = False

    def __init__(self, widening: Widening | None) -> None:
        self.widening = widening

    def send(self, batch: Any) -> Sent:
        narrow = _narrow_paths(batch, self.widening)
        return _Here(mapped(batch, lambda _, leaf: _moved(leaf, torch.device("cpu"))), narrow, self.widening)


class _Here:
    def __init__(self, batch: Any, narrow: frozenset[str], widening: Widening | None) -> None:
        self._batch, self._narrow, self._widening = batch, narrow, widening

    def arrive(self) -> Any:
        return _widened(self._batch, self._narrow, self._widening)


class ToCuda:
    """device: with an index. depth: batches that will be on their way at once."""

    ahead = True

    def __init__(self, device: torch.device, depth: int, widening: Widening | None) -> None:
        self.device, self.depth, self.widening = device, depth, widening
        self.memory = batch_memory(device)

    def send(self, batch: Any) -> Sent:
        """An error leaves nothing that is still read or written."""
        narrow = _narrow_paths(batch, self.widening)
        # What is made in inference mode could not be trained on after it.
        with torch.inference_mode(False), torch.no_grad():
            return _OnItsWay(self, batch, narrow)


class _OnItsWay:
    _ticket, _awaited = 0, False

    def __init__(self, transport: ToCuda, batch: Any, narrow: frozenset[str]) -> None:
        self._transport, self._narrow = transport, narrow
        self._home = torch.cuda.current_stream(transport.device)
        leaves: dict[int, Any] = {}
        mapped(batch, lambda _, leaf: leaves.setdefault(id(leaf), leaf))
        plain = {key: leaf for key, leaf in leaves.items() if _is_plain(leaf)}
        flat = [
            torch.empty(leaf.nbytes, dtype=torch.uint8, device=transport.device) for leaf in plain.values()
        ]
        moved: dict[int, Any] = {
            key: _shaped(bytes_, leaf) for (key, leaf), bytes_ in zip(plain.items(), flat, strict=True)
        }
        self._copy(list(plain.values()), flat)
        for key, leaf in leaves.items():
            if key not in plain:
                moved[key] = _moved(leaf, transport.device)
        self._begun = self._home.record_event() if len(moved) > len(plain) else None
        self._moved = list(moved.values())
        self._batch = mapped(batch, lambda _, leaf: moved[id(leaf)])

    def _copy(self, leaves: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        memory = self._transport.memory
        with memory.lock:
            sources, room = self._sources(leaves)
            try:
                for leaf, source, target in zip(leaves, sources, targets, strict=True):
                    if source is None:
                        _shaped(target, leaf).copy_(leaf)  # on home
                    else:
                        self._ticket = _C.copy_in(source, target, 0, self._home.cuda_stream)
            finally:
                if self._ticket:
                    memory.hold(self._ticket, (room, sources))

    def _sources(self, leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], Room | None]:
        """The bytes of each in pinned memory, there already or put there; None where there is no room. All that is
        put there is in one slot, which must be held while it is read."""
        pinned = [bool(leaf.is_pinned()) and _strides(leaf) == leaf.stride() for leaf in leaves]
        total = sum(_room(leaf) for leaf, lies in zip(leaves, pinned, strict=True) if not lies)
        room = self._transport.memory.take(total, self._transport.depth) if total else None
        sources: list[torch.Tensor | None] = []
        offset = 0
        for leaf, lies in zip(leaves, pinned, strict=True):
            if lies or room is None:
                sources.append(_bytes_of(leaf) if lies else None)
                continue
            source = room.memory[offset : offset + leaf.nbytes]
            _shaped(source, leaf).copy_(leaf)
            sources.append(source)
            offset += _room(leaf)
        return sources, room

    def arrive(self) -> Any:
        """The batch, for the present stream. After an error, it may be asked for again."""
        user = torch.cuda.current_stream(self._transport.device)
        _C.copy_await(self._transport.device.index, self._ticket, user.cuda_stream)
        if user != self._home:
            if self._begun is not None:
                user.wait_event(self._begun)
            for one in self._moved:
                if callable(record := getattr(one, "record_stream", None)):
                    record(user)
        self._awaited = True
        return _widened(self._batch, self._narrow, self._transport.widening)

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if self._ticket and not self._awaited and not sys.is_finalizing():
            _C.copy_await(self._transport.device.index, self._ticket, self._home.cuda_stream)


# ---- leaves ---------------------------------------------------------------------------------------------------------


def _is_plain(leaf: object) -> bool:
    """Whether its bytes are all there is to it."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_neg() or leaf.is_conj())
        and leaf.numel() > 0
    )


def _moved(leaf: Any, device: torch.device) -> Any:
    """By its own method, on the present stream."""
    if isinstance(leaf, torch.Tensor) and leaf.device == device:
        return leaf
    if device.type == "cuda" and callable(pin := getattr(leaf, "pin_memory", None)) and _is_on_cpu(leaf):
        leaf = pin()
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)


def _is_on_cpu(leaf: Any) -> bool:
    """As far as it says."""
    return (
        str(getattr(leaf, "device", "cpu")) == "cpu" and getattr(leaf, "layout", None) is not torch.sparse_coo
    )


def _strides(leaf: torch.Tensor) -> tuple[int, ...]:
    """Its own where it is dense, else a contiguous tensor's."""
    like = leaf if leaf.is_contiguous() else torch.empty_like(leaf, device="meta")
    return tuple(like.stride())


def _shaped(flat: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Those bytes as a tensor like `leaf`: no view, so that it has a version of its own."""
    tensor = torch.empty(0, dtype=leaf.dtype, device=flat.device)
    offset = flat.storage_offset() // leaf.itemsize
    return tensor.set_(flat.untyped_storage(), offset, leaf.size(), _strides(leaf))


def _bytes_of(leaf: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=leaf.device)
    return flat.set_(leaf.untyped_storage(), leaf.storage_offset() * leaf.itemsize, (leaf.nbytes,))


def _room(leaf: torch.Tensor) -> int:
    return -(-int(leaf.nbytes) // _APART) * _APART


# ---- widening -------------------------------------------------------------------------------------------------------


def _narrow_paths(batch: Any, widening: Widening | None) -> frozenset[str]:
    """Of the leaves that are to be widened, all of which can be."""
    if widening is None:
        return frozenset()
    leaves: dict[str, Any] = {}
    mapped(batch, lambda path, leaf: leaves.setdefault(path, leaf))
    if missing := widening.missing(leaves):
        there = ", ".join(f"{path!r} ({_described(leaf)})" for path, leaf in leaves.items())
        raise ValueError(f"widen={missing[0]!r} is nothing in this batch, which has {there or 'no tensors'}")
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
    wide: dict[int, torch.Tensor] = {}

    def widen(path: str, leaf: Any) -> Any:
        if path not in narrow:
            return leaf
        if id(leaf) not in wide:
            wide[id(leaf)] = widening(leaf)
        return wide[id(leaf)]

    with torch.inference_mode(False), torch.no_grad():
        return mapped(batch, widen)
