"""Batches in the order of their loader, a few of them sent before they are wanted. All of it runs in the program's own
thread, when it asks for a batch: what the loader raises, what it says of its position, Ctrl-C and thread-local state
are what they are without this.

Where a batch is asked for, the loader gives the one `depth` behind it, which is sent; then the one asked for arrives.
What the device was given before goes on meanwhile.

What the loader raises is kept in its place, and raised when its turn comes. A batch that cannot be sent for want of
memory, or because of the device, stays on the host, and is sent when its turn comes and others have gone. If that
fails, too, it is raised, and the batch is still the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memopt import _C
from memopt.data._prefetch.batch_transport import Sent, Transport

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
                "Prefetcher: a batch is being asked for already, by another thread or by the loader"
            )
        self._busy = True
        try:
            return self._next()
        finally:
            self._busy = False

    def close(self) -> None:
        """No more batches; those on their way are let go, and the loader's iterator is closed if it can be."""
        source = self.source
        self.abandon()
        if callable(close := getattr(source, "close", None)):
            close()

    def abandon(self) -> None:
        """No more batches; the loader's iterator may be another's now."""
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
        """Those behind the first that found no room before; whether there is now."""
        return all(self._send(place) for place in list(self._places)[1:])

    def _load(self) -> bool:
        """One more place; none behind an exception that is still to be raised."""
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
        """Whether nothing is left to be sent there."""
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
