"""memopt.data.Prefetcher: batches that are on the device when they are asked for."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Self

import torch

from memopt import _C
from memopt._offload.pinned_memory import index_of
from memopt._runtime import arguments
from memopt.data._prefetch.batch_transport import Sent, ToCpu, ToCuda, Transport, batch_memory
from memopt.data._prefetch.dequantize import Key, Numbers, Widening


class Prefetcher:
    """An iterable over a loader's batches on a device; the next ones are copied there while the device computes.

    An exception of the loader is raised when it is its batch's turn. A new iteration restarts the loader; a loader that
    can be iterated only once continues with the batch after the last one returned, also after a break. `len()` and all
    attributes are the loader's. `state_dict()` and `load_state_dict()` are supported if the loader has them
    (torchdata's StatefulDataLoader): the position is after the last batch returned, not after the last one fetched.

    An iterator may be used by one thread at a time. Prefetcher starts no thread: the loader runs in the thread that
    requests a batch, and its workers (num_workers) work ahead.

    Args:
        loader: Any iterable of batches: torch's DataLoader (with or without pin_memory), torchdata's, a generator. A
            batch is a tensor or any nesting of dicts, lists, tuples, named tuples and dataclasses. Objects with a `to`
            method are moved by that method; everything else is passed through.
        device: A CUDA device, or the CPU, to which nothing is copied and nothing is fetched ahead.
        depth: Number of batches in transfer after the one in use. Each takes its bytes once on the device and once in
            pinned memory; batches that are already pinned are copied directly.
        widen: Tensors that become floating point on the device, so that fewer bytes are copied: an index, key or field
            name, a path ("views.0"), several of these, or True for all tensors of 8 and 16 bits (uint8, int8, uint16,
            int16, float16, bfloat16). The result is `((x.float() * scale) - mean) / std`, bit for bit as on the CPU.
        mean: A number, or one for each channel.
        std: A number, or one for each channel.
        scale: A factor. True divides by the largest integer of the dtype, as ToTensor does (`x.div(255)`).
        dtype: The dtype of widened tensors: float32, float16 or bfloat16.
        channel_dim: The dimension to which mean and std apply. -3: NCHW, in either memory format; -1: NHWC.

    Raises:
        ValueError: Arguments do not fit each other, or do not fit a batch.
        TypeError: A tensor cannot be widened.
        torch.OutOfMemoryError: There is no memory for a batch when it is its turn. It is still the next one.

    Examples:
        >>> for images, labels in memopt.data.Prefetcher(loader, "cuda", widen=0, scale=True, mean=MEAN, std=STD):
        ...     train(images, labels)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int = "cuda",
        depth: int = 2,
        *,
        widen: bool | Key | Collection[Key] | None = None,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        scale: float | bool | None = None,
        dtype: torch.dtype = torch.float32,
        channel_dim: int = -3,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"Prefetcher: loader is {arguments.shown(loader)}: give a DataLoader, or batches")
        self.loader = loader
        self.device = torch.device(device)
        if self.device.type not in ("cuda", "cpu"):
            raise ValueError(f"Prefetcher: device={device}: batches go to a CUDA device or stay on the CPU")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"Prefetcher: depth={depth}: expected at least 1 batch")
        self.depth = depth
        self._widening: Widening | None = None
        if widen is not None and widen is not False:
            self._widening = Widening(widen, mean, std, None if scale is False else scale, dtype, channel_dim)
        elif any(given is not None and given is not False for given in (mean, std, scale)):
            raise ValueError(
                "Prefetcher: mean, std and scale apply to widened tensors: give widen=0, widen='image' or widen=True"
            )
        self._transport: Transport | None = None
        self._position = Position()
        self._kept: BatchesAhead | None = None  # of a loader that cannot begin anew
        self._latest: weakref.ref[BatchesAhead] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            return self._kept
        source = iter(self.loader)
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.source is source:
            latest.abandon()  # persistent workers: the loader has begun its one iterator anew
        begun = self._begin(source)
        self._latest = weakref.ref(begun)
        if source is self.loader:
            self._kept = begun
        return begun

    def close(self) -> None:
        """End the latest iteration: batches in transfer are dropped, a generator is closed."""
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            latest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return the loader's attribute."""
        if name == "loader":  # not there yet: a copy is being made
            raise AttributeError(name)
        found = getattr(self.loader, name)
        if name == "state_dict":
            return self._state_dict
        return self._load_state_dict if name == "load_state_dict" else found

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory of all prefetchers to this device: `depth` batches, minus those already pinned."""
        if self.device.type == "cpu":
            return 0
        return batch_memory(torch.device("cuda", index_of(self.device))).nbytes

    def _begin(self, source: Iterator[Any]) -> BatchesAhead:
        if self._transport is None:
            if self.device.type == "cpu":
                self._transport = ToCpu(self._widening)
            else:
                device = torch.device("cuda", index_of(self.device))
                self._transport = ToCuda(device, self.depth, self._widening)
        self._position = Position()
        position_of = self._position_of if hasattr(self.loader, "state_dict") else None
        return BatchesAhead(source, self._transport, self.depth, self._position, position_of)

    def _position_of(self) -> Any:
        """Return a copy: a dataset's own state may refer to objects that change while it is read."""
        return copy.deepcopy(self.loader.state_dict())  # type: ignore[attr-defined]

    def _state_dict(self) -> Any:
        """Return the loader's state when the last batch was given out."""
        return copy.deepcopy(self._position.state) if self._position.known else self._position_of()

    def _load_state_dict(self, state: Any) -> None:
        """Load the loader's state; the next iteration begins there."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._position = Position()


# ---- batches sent ahead ----------------------------------------------------------------------------------------------
# Batches in the order of their loader, a few of them sent before they are wanted. All of it runs in the program's own
# thread, when it asks for a batch: what the loader raises, what it says of its position, Ctrl-C and thread-local state
# are what they are without this.
#
# Where a batch is asked for, the loader gives the one `depth` behind it, which is sent; then the one asked for arrives.
# What the device was given before goes on meanwhile.
#
# What the loader raises is kept in its place, and raised when its turn comes. A batch that cannot be sent for want of
# memory, or because of the device, stays on the host, and is sent when its turn comes and others have gone. If that
# fails, too, it is raised, and the batch is still the next.


_LATER = (torch.OutOfMemoryError, MemoryError, _C.Error)  # may go better when the time comes


class Position:
    """The position of a resumable loader when the last batch was given out."""

    state: Any = None
    known = False

    def set(self, state: Any) -> None:
        self.state, self.known = state, True


class _Place:
    """A result of the loader: a batch, an exception (`error`), or its end (`error` is StopIteration)."""

    __slots__ = ("batch", "error", "sent", "state")

    def __init__(self) -> None:
        self.batch: Any = None
        self.sent: Sent | None = None
        self.error: Exception | None = None
        self.state: Any = None


class BatchesAhead(Iterator[Any]):
    """position_of: what the loader says of its position, if it can."""

    def __init__(
        self,
        source: Iterator[Any],
        transport: Transport,
        depth: int,
        position: Position,
        position_of: Callable[[], Any] | None,
    ) -> None:
        self.source: Iterator[Any] | None = source
        self._transport, self._position, self._position_of = transport, position, position_of
        self._depth = depth if transport.ahead else 0
        self._places: deque[_Place] = deque()
        self._begun = self._busy = False

    def __iter__(self) -> BatchesAhead:
        return self

    def __next__(self) -> Any:
        if self._busy:  # as generators say
            raise ValueError(
                "Prefetcher: a batch is already being requested, by another thread or by the loader"
            )
        self._busy = True
        try:
            return self._next()
        finally:
            self._busy = False

    def close(self) -> None:
        """Yield no more batches; those in transfer are dropped, and the loader's iterator is closed if it can be."""
        source = self.source
        self.abandon()
        if callable(close := getattr(source, "close", None)):
            close()

    def abandon(self) -> None:
        """Yield no more batches, and leave the loader's iterator, which another iteration may use now."""
        self.source = None
        self._places.clear()

    def _next(self) -> Any:
        # What the loader raises ahead of its turn is kept, and with it each frame that runs now: those hold no batch.
        if not self._begun:
            if self._position_of is not None:
                self._position.set(self._position_of())
            self._begun = True
        if not self._places and not self._load():
            raise StopIteration
        self._send(self._places[0], its_turn=True)
        if self._send_waiting():
            while len(self._places) <= self._depth and self._load() and self._send(self._places[-1]):
                pass
        return self._give_out()

    def _give_out(self) -> Any:
        place, batch = self._places[0], None
        if place.sent is not None:
            batch = self._arrived(place)
        self._places.popleft()
        if self._position_of is not None:
            self._position.set(place.state)
        error, place.error = place.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame, which is not to hold it
        return batch

    def _send_waiting(self) -> bool:
        """Send the batches behind the first that found no room before; return whether there is room now."""
        return all(self._send(place) for place in list(self._places)[1:])

    def _load(self) -> bool:
        """Load one more batch; none after an exception that is still to be raised."""
        if self.source is None or (self._places and self._places[-1].error is not None):
            return False
        place = _Place()
        try:
            place.batch = next(self.source)
        except StopIteration:
            place.error, self.source = StopIteration(), None
        except Exception as error:
            place.error = error
        if self._position_of is not None:
            place.state = self._position_of()
        self._places.append(place)
        return True

    def _send(self, place: _Place, *, its_turn: bool = False) -> bool:
        """Send a batch; return whether nothing is left to be sent."""
        if place.sent is None and place.error is None:
            try:
                place.sent = self._transport.send(place.batch)
            except _LATER:
                if its_turn:
                    raise
                return False
            except Exception as error:
                place.error = error
            place.batch = None
        return True

    def _arrived(self, place: _Place) -> Any:
        assert place.sent is not None
        try:
            return place.sent.arrive()
        except _LATER:
            raise
        except Exception as error:
            place.error = error
            return None
