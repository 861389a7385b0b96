"""memopt.BatchSize: a batch size that a loop can change step by step, and batches of indices that follow it."""

from __future__ import annotations

import gc
import math
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch

from memopt._memory.oom import exceptions
from memopt._memory.oom.exceptions import is_out_of_memory
from memopt._runtime import arguments
from memopt._runtime.log import logger

Result = TypeVar("Result")


class BatchSize:
    """A batch size that shrinks after an out-of-memory error and grows back; int() gives the current size.

    After an out-of-memory error at n, the size becomes n * shrink, rounded down, or the size that it has just grown
    from, but at least `minimum`. After grow_after successful steps in a row it grows halfway to the smallest size that
    did not fit. It stops one below that size, so a second epoch does not run out of memory again. Only after
    forget_after steps in a row is that size tried again, because the memory may be free by then. Each time that it
    still does not fit, forget_after doubles.

    Changes made by a failed step are not undone, except for random states in run(): the program is responsible for
    gradients and weights. Begin a step with zero_grad(). For the exact gradient of a larger batch, see memopt.backward.

    Args:
        size: The size to begin with.
        maximum: The largest size; by default `size`.
        minimum: The smallest size.
        shrink: The factor by which a size that did not fit is multiplied.
        grow_after: The number of successful steps in a row before the size grows.
        forget_after: The number of steps in a row after which a size that did not fit is tried again.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> size = memopt.BatchSize(64)
        >>> while training:  # again with fewer where it runs out of memory
        ...     loss = size.run(lambda n: step(buffer.sample(n)))
        >>> loader = DataLoader(dataset, batch_sampler=size.sampler(RandomSampler(dataset)))
        >>> for x, y in loader:
        ...     with size.attempt():  # an out-of-memory error ends here, and so does this batch:
        ...         step(x, y)  # the sampler gives its samples again, in smaller batches
    """

    def __init__(
        self,
        size: int,
        *,
        maximum: int | None = None,
        minimum: int = 1,
        shrink: float = 0.5,
        grow_after: int = 50,
        forget_after: int = 2000,
    ) -> None:
        maximum = size if maximum is None else maximum
        for name, value in (("size", size), ("minimum", minimum), ("maximum", maximum)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {arguments.shown(value)}: give a number of samples")
        if not 1 <= minimum <= size <= maximum:
            raise ValueError(
                f"minimum={minimum}, size={size}, maximum={maximum} must satisfy 1 <= minimum <= size <= maximum"
            )
        if not 0 < shrink < 1:
            raise ValueError(
                f"shrink={shrink!r}: the factor applied to a size that failed must lie between 0 and 1"
            )
        if grow_after < 1 or forget_after < 1:
            raise ValueError(
                f"grow_after={grow_after}, forget_after={forget_after}: both must be numbers of steps, 1 or more"
            )
        self.value, self.maximum, self.minimum = size, maximum, minimum
        self.shrink, self.grow_after, self.forget_after = shrink, grow_after, forget_after
        self.failures = 0  # outs of memory so far
        self._bound: int | None = None  # the least size that has failed, if it is not forgotten
        self._before: int | None = None  # the size that this one grew from, until it has proved itself
        self._forgot = False  # the last bound, and it has not proved to be right
        self._good = 0  # steps in a row that fitted, at this size
        self._good_in_all = 0  # since the last that failed
        self._samplers: list[AdaptiveBatchSampler] = []

    def __int__(self) -> int:
        return self.value

    __index__ = __int__

    def __repr__(self) -> str:
        bound = f", {self._bound} did not fit" if self._bound is not None else ""
        return (
            f"BatchSize({self.value} of at most {self.maximum}{bound}, {self.failures} times out of memory)"
        )

    # ---- one step --------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[int], Result]) -> Result:
        """Call a function of the size, and again with smaller ones after out-of-memory errors.

        Each call begins with the same random states.

        Args:
            fn: A step, called with the size.

        Returns:
            What fn returns.

        Raises:
            torch.OutOfMemoryError: fn runs out of memory at the smallest size. Other exceptions of fn are passed on.
        """
        from memopt._runtime.state_snapshot import RandomState

        random_state = RandomState()
        while True:
            with self.attempt():
                return fn(self.value)
            random_state.restore()  # it ran out of memory

    def attempt(self) -> Attempt:
        """Return a context for one step.

        An out-of-memory error is caught at the end of the block: the size shrinks, `.failed` of the context's value is
        True, the frames of the step are cleared, and the program continues after the block. At the smallest size the
        error is raised. Variables of the block itself are not cleared: put the step into a function.
        """
        return Attempt(self)

    def worked(self) -> None:
        """Count a successful step, for loops that catch the error themselves."""
        self._good += 1
        self._good_in_all += 1
        if self._bound is not None and self._good_in_all >= self.forget_after:
            self._good = self._good_in_all = 0
            self._grow(min(self._bound, self.maximum))
            self._bound, self._forgot = None, True
        elif self._good >= self.grow_after:
            self._good, self._before, self._forgot = 0, None, False
            most = self.maximum if self._bound is None else min(self.maximum, self._bound - 1)
            self._grow((self.value + most + 1) // 2)

    def failed(self, size: int | None = None) -> None:
        """Shrink after a step that ran out of memory, for loops that catch the error themselves.

        Call it after the exception handler, when the step's tensors are gone.

        Args:
            size: The number of samples of the step; by default the current size.
        """
        size = self.value if size is None else size
        self.failures += 1
        self._bound = size if self._bound is None else min(self._bound, size)
        self._good = self._good_in_all = 0
        if size > self.value:
            return  # a batch that a loader's workers had made before the size shrank
        if self._forgot:
            self.forget_after *= 2
        # What it has just grown from has fitted; where it had fitted itself, something else has taken memory.
        smaller = int(self.value * self.shrink) if self._before is None else self._before
        self._forgot, self._before = False, None
        self._set(max(self.minimum, smaller))

    def _grow(self, value: int) -> None:
        if value > self.value:
            self._before = self.value
            self._set(value)

    def _set(self, value: int) -> None:
        logger.info("batch size: %d, was %d", value, self.value)
        self.value = value

    # ---- data and resuming -----------------------------------------------------------------------------------------

    def sampler(self, samples: Any, *, drop_last: bool = False) -> AdaptiveBatchSampler:
        """Make a batch sampler for torch's DataLoader(batch_sampler=), of this size at every batch.

        Args:
            samples: A Sampler, or any iterable of indices.
            drop_last: Whether to leave out a smaller last batch.

        Returns:
            An AdaptiveBatchSampler.
        """
        made = AdaptiveBatchSampler(samples, self, drop_last=drop_last)
        self._samplers.append(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain numbers, from which another BatchSize continues by load_state_dict()."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another BatchSize.

        Args:
            state: What state_dict() returned.

        Raises:
            ValueError: It is not such a state, or its size is outside this one's bounds; nothing has changed then.
        """
        if set(state) != set(_STATE):
            raise ValueError(
                f"this is not the state of a BatchSize: it has {sorted(state)}, not {sorted(_STATE)}"
            )
        if not self.minimum <= state["value"] <= self.maximum:
            raise ValueError(f"the state's size {state['value']} is not in {self.minimum} … {self.maximum}")
        for name in _STATE:
            setattr(self, name, state[name])


_STATE = ("value", "failures", "forget_after", "_bound", "_before", "_forgot", "_good", "_good_in_all")


class Attempt:
    """One step under a BatchSize.

    `size`: of its batch, by the sampler if there is one; `failed`: whether it ran out of memory.
    """

    def __init__(self, of: BatchSize) -> None:
        self._of = of
        batches = [batch for sampler in of._samplers if (batch := sampler.open) is not None]
        self.size = max(map(len, batches), default=of.value)
        self.failed = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: types.TracebackType | None
    ) -> bool:
        of = self._of
        self.failed = error is not None and self.size > of.minimum and is_out_of_memory(error)
        if self.failed:
            of.failed(self.size)
            # `with` holds the exception until this returns; and with it all that the step's frames have.
            exceptions.empty_frames(error)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        elif error is None:
            of.worked()
        for sampler in of._samplers:
            sampler.ended(self.failed)
        return self.failed


class AdaptiveBatchSampler:
    """A batch sampler for DataLoader(batch_sampler=); BatchSize.sampler() makes it.

    It yields each sample once an epoch, and yields the samples of a batch that ran out of memory again, in smaller
    batches. Without workers they come next; with workers they come after the batches that are fetched already
    (num_workers * prefetch_factor, of the earlier size). Samples that failed after the last batch had been requested
    come first in the next epoch.

    Batches are matched by order: the n-th BatchSize.attempt() is assumed to be the n-th batch. In a loop without
    attempts no sample is repeated. len() is the length of the epoch at the current size.
    """

    def __init__(self, samples: Iterable[int], size: BatchSize, *, drop_last: bool = False) -> None:
        self._samples, self._size, self._drop_last = samples, size, drop_last
        self._given: deque[list[int]] = deque()  # that no attempt has ended with so far
        self._again: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self._given.clear()  # an epoch that was left early has attempts for none of them
        fresh = iter(self._samples)
        while True:
            batch: list[int] = []
            size = self._size.value
            while len(batch) < size and self._again:
                batch.append(self._again.popleft())
            while len(batch) < size:
                index = next(fresh, None)
                if index is None:
                    break
                batch.append(index)
            if not batch or (self._drop_last and len(batch) < size):
                return
            self._given.append(batch)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._samples, Sized):
            raise TypeError(f"{type(self._samples).__name__} has no length, so its batches have none either")
        whole = len(self._samples) + len(self._again)
        return whole // self._size.value if self._drop_last else math.ceil(whole / self._size.value)

    @property
    def open(self) -> list[int] | None:
        """The earliest batch whose attempt has not ended."""
        return self._given[0] if self._given else None

    def ended(self, failed: bool) -> None:
        """Record the end of the attempt at the earliest batch that is still open.

        Args:
            failed: Whether it ran out of memory.
        """
        batch = self._given.popleft() if self._given else []
        if failed:
            self._again.extend(batch)
