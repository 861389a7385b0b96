"""Batches that are on the device when they are asked for: memopt.data.Prefetcher."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import torch

from memopt._offload.pinned_memory import index_of
from memopt.data._prefetch.batch_memory import batch_memory
from memopt.data._prefetch.batch_transport import ToCpu, ToCuda, Transport
from memopt.data._prefetch.dequantize import Key, Numbers, Widening
from memopt.data._prefetch.prefetch_queue import BatchesAhead, Position


class Prefetcher:
    """An iterable over a loader's batches on a device, where the next ones are copied to beside the computation.

    What the loader raises is raised when the turn of its batch comes. Iterating anew begins the loader anew; a loader
    that can be iterated only once goes on with the batch after the last one given out, also after a break. `len()` and
    all attributes are the loader's. `state_dict()` and `load_state_dict()` are those of a loader that has them
    (torchdata's StatefulDataLoader): the position is behind the last batch given out, not behind the last one fetched.

    An iterator is for one thread at a time. Prefetcher starts no thread: the loader runs where the batch is asked for,
    and its workers (num_workers) work ahead.

    Args:
        loader: Any iterable of batches: torch's DataLoader (with or without pin_memory), torchdata's, a generator. A
            batch is a tensor or any nesting of dicts, lists, tuples, named tuples and dataclasses. Objects with a
            method `to` are moved by it; everything else is passed through.
        device: A CUDA device, or the CPU, to which nothing is copied and nothing is fetched ahead.
        depth: Batches on their way behind the one in use. The bytes of each are taken once on the device and once in
            pinned memory; batches that are pinned already are copied from where they lie.
        widen: Tensors that become floating point on the device, so that fewer bytes travel: an index, key or field
            name, a path ("views.0"), several of these, or True for all of 8 and 16 bits (uint8, int8, uint16, int16,
            float16, bfloat16). The result is `((x.float() * scale) - mean) / std`, bit for bit as on the CPU.
        mean: A number, or one for each channel.
        std: A number, or one for each channel.
        scale: A factor. True divides by the largest integer of the dtype, as ToTensor does (`x.div(255)`).
        dtype: Of widened tensors: float32, float16 or bfloat16.
        channel_dim: The dimension of mean and std. -3: NCHW, in either memory format; -1: NHWC.

    Raises:
        ValueError: Arguments, or a batch and they, do not fit.
        TypeError: A tensor cannot be widened.
        torch.OutOfMemoryError: A batch finds no room when its turn has come. It is still the next one.

    Example:
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
                "Prefetcher: mean, std and scale are of what is widened: say widen=0, widen='image' or widen=True"
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
        """End the latest iteration: batches on their way are dropped, a generator is closed."""
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
        """The loader's."""
        if name == "loader":  # not there yet: a copy is being made
            raise AttributeError(name)
        found = getattr(self.loader, name)
        if name == "state_dict":
            return self._state_dict
        return self._load_state_dict if name == "load_state_dict" else found

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory in bytes, of all prefetchers to this device: depth batches, less those that came so."""
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
        """A copy: a dataset's own may be of what changes while it is read."""
        return copy.deepcopy(self.loader.state_dict())  # type: ignore[attr-defined]

    def _state_dict(self) -> Any:
        """The loader's, as it was when the last batch was given out."""
        return copy.deepcopy(self._position.state) if self._position.known else self._position_of()

    def _load_state_dict(self, state: Any) -> None:
        """The loader's; the next iteration begins there."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._position = Position()
