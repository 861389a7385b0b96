"""memopt.find_batch_size(): the largest batch size whose step fits, by running steps, all of which are undone.

For a card that is not here (card=) the steps run on the simulated device of memopt.estimate."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memopt import _C
from memopt._batch_size.device_memory import BudgetExceeded, DeviceMemory, TrialMemory, device_memory
from memopt._batch_size.result import FoundBatchSize, NoBatchSizeFits, Trial
from memopt._memory.oom.exceptions import bytes_asked, is_out_of_memory
from memopt._runtime import arguments
from memopt._runtime.log import logger
from memopt._runtime.state_snapshot import TrainingState

Many = Any  # one object, or several in a tuple or list, or None


def find_batch_size(
    fn: Callable[[int], object],
    start: int = 2,
    *,
    maximum: int = 1 << 20,
    minimum: int = 1,
    multiple_of: int = 1,
    headroom: float = 0.05,
    within: float | None = None,
    memory_budget: int | float | str | None = None,
    model: Many = None,
    optimizer: Many = None,
    scaler: Many = None,
    stateful: Iterable[Any] = (),
    steps: int = 2,
    device: torch.device | str | int | None = None,
    card: str | int | None = None,
    sample: Any = None,
    unprotected: bool = False,
) -> FoundBatchSize:
    """Find the largest batch size that fits, by running whole training steps of growing sizes.

    Sizes grow from `start` until one does not fit, at most to `maximum`; then the gap is searched, among the multiples
    of `multiple_of`. The returned size has itself been run, for `steps` steps in a row: the first step creates the
    optimizer's states, the second runs beside them. A size fits if nothing ran out of memory and `headroom` remained
    free at the peak. The allocator's cache and the memory of other processes are not counted as free.

    Afterwards the parameters, buffers, gradients and modes of `model`, the states and groups of `optimizer`, `scaler`,
    the objects in `stateful`, and the random states of Python, NumPy and torch are restored bit for bit. The search
    keeps copies of them on the host, which takes as many bytes there. Other changes by fn remain: pass a fixed batch,
    not a loader's next one. torch's peak counters are reset.

    In a run of several ranks, search before the model is wrapped in DDP or sharded; a wrapped or sharded model is
    refused.

    Args:
        fn: One whole training step (data, forward, backward, optimizer.step, zero_grad); it is called with the batch
            size. With `card`: a module, or a function of a sample that returns a loss.
        start: The size to begin with.
        maximum: The largest size to try.
        minimum: The smallest useful size.
        multiple_of: Only multiples of this number are tried.
        headroom: The fraction of the device that must remain free.
        within: The fraction of the largest size by which the answer may be too small; by default a tenth of the
            headroom, so without headroom the answer is the largest size itself.
        memory_budget: The most bytes ("8GiB") of tensors that may live at once. On the CPU this is the only bound, by
            default the host's free memory, and an attempt ends when it exceeds it.
        model: The module to restore; like the next two arguments a single object, a tuple of several, or None.
        optimizer: The optimizer to restore; with `card` an optimizer or a class.
        scaler: The gradient scaler to restore.
        stateful: Other objects to restore: schedulers, generators.
        steps: The number of steps of each attempt.
        device: The device; the model's by default, else the current CUDA device, else the CPU.
        card: A GPU that this machine lacks ("4090", "24GiB"): memopt.estimate's simulated device answers. Each attempt
            is a run of `steps` steps in a child process, and nothing in this process is changed.
        sample: With `card`, a batch of any size (first dimension).
        unprotected: With `card`, as memopt.estimate() takes it.

    Returns:
        A FoundBatchSize: .batch_size, .tried (each size with its bytes, and why it does not fit), .stopped; .samples
        and .seconds give the cost of the search. Print it.

    Raises:
        NoBatchSizeFits: Not even `minimum` fits; the exception has the least number of bytes that it needs.
        ValueError: An argument is out of range, or fn does not use its argument.
        Exception: Whatever fn raises, other than an out-of-memory error, after everything is restored.

    Examples:
        >>> found = memopt.find_batch_size(step, model=model, optimizer=optimizer, headroom=0.1)
        >>> print(found.batch_size)
    """
    within = headroom / 10 if within is None else within
    _check(fn, start, maximum, minimum, multiple_of, headroom, within, steps)
    if card is not None:
        bounds = (start // multiple_of, -(-minimum // multiple_of), maximum // multiple_of)
        return _on_card(
            fn, sample, card, optimizer, bounds, multiple_of, headroom, within, steps, unprotected
        )
    if sample is not None:
        raise ValueError("sample= is used with card= only: a step that runs here makes its own batch")
    _refuse_ranks(_several(model))
    models, optimizers, scalers = _several(model), _several(optimizer), _several(scaler)
    where = _device(device, models)
    budget = None if memory_budget is None else arguments.budget(memory_budget, where)
    begun, compiled = time.perf_counter(), _compilations()
    gc.collect()
    kept = TrainingState(models, optimizers, scalers, stateful)
    memory = device_memory(where, headroom, budget)
    tries = _Tries(fn, memory, kept, steps)
    unit = multiple_of
    bracket = Bracket(start // unit, -(-minimum // unit), maximum // unit, memory.room, within)
    try:
        while (probe := bracket.next()) is not None:
            taken = tries.run(probe * unit)
            if taken is None:
                bracket.fails(probe)
            else:
                room = memory.of_room(taken)
                bracket.fits(probe, room, room - taken.peak + taken.left)
    finally:
        kept.restore()
        memory.begin()  # what the last try left in the cache goes too
    if bracket.best is None:
        raise none_fits(tries, memory)
    return FoundBatchSize(
        batch_size=bracket.best * unit,
        device=memory.name,
        room_bytes=memory.room,
        total_bytes=memory.total,
        headroom=headroom,
        stopped=_why_stopped(tries.tried, bracket.high * unit),
        tried=tries.tried,
        seconds=time.perf_counter() - begun,
        notes=_notes(tries, _compilations() - compiled),
    )


class _Tries:
    def __init__(
        self, fn: Callable[[int], object], memory: DeviceMemory, kept: TrainingState, steps: int
    ) -> None:
        self._fn, self._memory, self._kept, self._steps = fn, memory, kept, steps
        self.tried: list[Trial] = []
        self.least = 0  # bytes that the last one that failed would have taken at least
        self._asked: dict[int, int] = {}

    def run(self, size: int) -> TrialMemory | None:
        """Run a size. Returns the memory that it takes, None if it does not fit."""
        self._memory.begin()
        begun = time.perf_counter()
        done, taken, why = self._attempt(size)
        # Here the exception is gone, and its frames with all that they held; in the handler they were still there.
        if why:
            gc.collect()
        else:
            why = self._memory.exceeded(taken)
            self.least = taken.held
        self._kept.restore_values()
        seconds = time.perf_counter() - begun
        trial = Trial(size, not why, done, taken.peak, taken.held, seconds, taken.retries, why)
        self.tried.append(trial)
        logger.info(
            "batch size %d: %s", size, f"fits, {_C.format_size(taken.held)} held" if trial.fits else why
        )
        if trial.fits:
            self._check_used(size, taken)
        return taken if trial.fits else None

    def _attempt(self, size: int) -> tuple[int, TrialMemory, str]:
        """Return the steps that were started, the memory that they took, and why they ended before the last."""
        done = 0
        try:
            for done in range(1, self._steps + 1):  # noqa: B007
                with self._memory.watching():
                    self._fn(size)
            return done, self._memory.taken(), ""
        except Exception as error:
            if not is_out_of_memory(error):
                if self.tried and not any(trial.fits for trial in self.tried):
                    # A size that is too small for fn itself (for a BatchNorm, say), below one that is too large.
                    raise none_fits(self, self._memory) from error
                raise
            taken = self._memory.taken()
            self.least = max(taken.peak, taken.left + (bytes_asked(error) or 0))
            return done, taken, _first_line(error)

    def _check_used(self, size: int, taken: TrialMemory) -> None:
        """Check that fn uses its argument.

        The first trial creates what remains, so it requests more than the others."""
        if len(self.tried) < 2 or not taken.asked:
            return
        self._asked[size] = taken.asked
        smallest = min(self._asked)
        if size >= 16 * smallest and self._asked[smallest] == taken.asked:
            raise ValueError(
                f"fn(batch_size) requests the same {_C.format_size(taken.asked)} with {size} as with {smallest}: it "
                "must make a batch of the size that it is given"
            )


def _why_stopped(tried: list[Trial], above: int) -> str:
    failed = [trial for trial in tried if not trial.fits and trial.batch_size == above]
    return f"{above} does not fit: {failed[-1].why}" if failed else f"the maximum, below {above}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, BudgetExceeded):
        return str(error)
    asked = bytes_asked(error)
    if asked is not None:
        return f"out of memory when it requested {_C.format_size(asked)}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def none_fits(tries: _Tries, memory: DeviceMemory) -> NoBatchSizeFits:
    smallest = min(tries.tried, key=lambda trial: trial.batch_size)
    least = tries.least
    return NoBatchSizeFits(
        f"no batch size fits on {memory.name}: a step with {smallest.batch_size} takes at least "
        f"{_C.format_size(least)} ({least} bytes), but only {_C.format_size(memory.room)} of "
        f"{_C.format_size(memory.total)} may be used ({smallest.why}). See memopt.auto_checkpoint, which recomputes "
        "activations instead of keeping them, and memopt.estimate, which reports where the memory goes",
        least,
        tries.tried,
    )


def _notes(tries: _Tries, compilations: int) -> list[str]:
    notes = []
    if compilations:
        notes.append(
            f"torch.compile compiled {compilations} times for {len(tries.tried)} sizes: each size is a shape of its "
            "own until the dimension is marked as dynamic, and after torch._dynamo.config.recompile_limit "
            "compilations it compiles no more; torch.compiler.reset() starts again"
        )
    if any(trial.retries for trial in tries.tried if trial.fits):
        notes.append(
            "with some sizes that fit, the allocator emptied its cache during the step: they run, but slowly"
        )
    return notes


def _compilations() -> int:
    """Return the number of graphs that torch.compile has made so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


# ---- arguments -----------------------------------------------------------------------------------------------------


def _check(
    fn: Any,
    start: Any,
    maximum: int,
    minimum: int,
    multiple_of: int,
    headroom: float,
    within: float,
    steps: int,
) -> None:
    if not callable(fn):
        raise TypeError(f"fn is {arguments.shown(fn)}: give a function of a batch size, which runs a step")
    numbers = {
        "start": start, "maximum": maximum, "minimum": minimum, "multiple_of": multiple_of, "steps": steps
    }  # fmt: skip
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name} is {arguments.shown(value)}: give a number of samples or steps, 1 or more"
            )
    if maximum // multiple_of < -(-minimum // multiple_of):
        raise ValueError(f"no multiple of {multiple_of} lies between minimum={minimum} and maximum={maximum}")
    if not 0 <= headroom < 1:
        raise ValueError(
            f"headroom={headroom!r} is not a share of the device: write 0.05 for a twentieth of it"
        )
    if not 0 <= within < 1:
        raise ValueError(f"within={within!r} is not a share of a batch size: write 0 for the exact largest")


def _refuse_ranks(models: list[torch.nn.Module]) -> None:
    """Refuse several ranks: a trial that runs out of memory on one rank leaves the others in a collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds = {kind.__name__ for model in models for part in model.modules() for kind in type(part).__mro__}
    found = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    if found and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"model is wrapped by {found.pop()}, and a trial that runs out of memory on one rank would leave the "
            "others waiting: search with the module before it is wrapped, in a step without collectives, or use "
            "memopt.estimate"
        )


def _several(found: Many) -> list[Any]:
    return [] if found is None else list(found) if isinstance(found, tuple | list) else [found]


def _device(device: torch.device | str | int | None, models: list[torch.nn.Module]) -> torch.device:
    if device is not None:
        return torch.device(device)
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- on the simulated device -----------------------------------------------------------------------------------------


def _on_card(
    subject: Any,
    sample: Any,
    card: str | int,
    optimizer: Any,
    bounds: tuple[int, int, int],
    unit: int,
    headroom: float,
    within: float,
    steps: int,
    unprotected: bool,
) -> FoundBatchSize:
    """Search on a card that is not present.

    bounds: start, least and most, in units. Raises ValueError for an unknown card, or a sample without a batch."""
    from memopt._estimate import cards, model

    whole = cards.card(card)
    room = int((1 - headroom) * whole.usable_bytes)
    limited = cards.Card(
        whole.name, room, whole.compute_capability, whole.multiprocessors, whole.context_bytes
    )
    size = model.batch_of(sample)
    if size is None:
        raise ValueError(
            "card=: pass sample=, a batch of any size, whose first dimension is the batch dimension"
        )
    tried: list[Trial] = []
    notes: dict[str, None] = {}
    begun = time.perf_counter()
    bracket = Bracket(*bounds, room, within)
    while (probe := bracket.next()) is not None:
        count, since = probe * unit, time.perf_counter()
        batch = model.resized(sample, size, count)
        told = model.estimate(
            subject, batch, optimizer=optimizer, steps=steps, quick=True, unprotected=unprotected
        )
        fits = told.fits(limited)
        why = "" if fits else f"{_C.format_size(told.needed_bytes[1])} needed"
        peak, held = told.peak_bytes[1], told.needed_bytes[1]
        tried.append(Trial(count, fits, told.steps, peak, held, time.perf_counter() - since, why=why))
        notes[f"by memopt.estimate, on {told.method}"] = None
        if fits:
            bracket.fits(probe, held)
        else:
            bracket.fails(probe)
    if bracket.best is None:
        smallest = min(tried, key=lambda trial: trial.batch_size)
        raise NoBatchSizeFits(
            f"no batch size fits on {whole}: a step with {smallest.batch_size} takes {smallest.held_bytes} bytes, but "
            f"only {_C.format_size(room)} may be used",
            smallest.held_bytes,
            tried,
        )
    return FoundBatchSize(
        batch_size=bracket.best * unit,
        device=whole.name,
        room_bytes=room,
        total_bytes=whole.usable_bytes,
        headroom=headroom,
        stopped=_why_stopped(tried, bracket.high * unit),
        tried=tried,
        seconds=time.perf_counter() - begun,
        notes=list(notes),
    )


# ---- the search ------------------------------------------------------------------------------------------------------


class Bracket:
    """The search for the largest size that fits, and which size is worth trying next. Numbers alone: no torch.

    `low` is the largest that has fitted (least - 1 before any has), `high` the smallest that has not (most + 1 before
    any): low <= answer < high at all times, and the search is over when high - low is 1, or within a given part of low.

    Sizes double until one fails, and then the gap is halved; but bytes grow as a line in most training steps, so where
    the line through what was measured meets the room is tried before that. A line that misleads costs tries: after two
    that brought little comes one that halves for sure, so that n tries beyond the doubling close a gap of 2^(n/3).
    """

    def __init__(self, start: int, least: int, most: int, room: int, within: float = 0.0) -> None:
        """Begin a search.

        start: tried first, or what is nearest to it of least … most; room: bytes that may be taken; within: the answer
        may be too small by that part of itself.
        """
        self._within = within
        self.low, self.high, self.least, self.most, self.room = least - 1, most + 1, least, most, room
        self._points: dict[int, int] = {}
        self._base: int | None = None
        self._next: int | None = min(max(start, least), most)
        self._poor = 0  # guesses in a row that did not halve the gap
        self._gap = self.high

    def next(self) -> int | None:
        """Return the size to try next; None when low is the answer."""
        if self.high - self.low <= max(1, self._within * self.low):
            return None
        if self._next is not None:
            return self._next
        gap = self.high - self.low
        self._poor = 0 if 2 * gap <= self._gap else self._poor + 1
        self._gap = gap
        guess = self._meets()
        if guess is not None and self.low <= guess < self.high and self._poor < 3:
            # Beyond its second point a line is trusted for three doublings.
            return min(max(guess, self.low + 1), 8 * self.low)
        self._poor = 0
        if self.high > self.most:  # none has failed so far
            return min(8 * self.low if guess is not None and guess > self.most else 2 * self.low, self.most)
        return (self.low + self.high) // 2

    def fits(self, size: int, taken: int, left: int | None = None) -> None:
        """Note that a size fits.

        taken: bytes of the room; left: the part of them that remains when the step is over, as if it had no samples."""
        if left is not None and left < taken:
            self._base = left
        self._next = None
        self._points[size] = taken
        self.low = max(self.low, size)

    def fails(self, size: int) -> None:
        """Note that a size does not fit, even if it fitted before."""
        self._next = None
        self.high = min(self.high, size)
        self._points = {n: taken for n, taken in self._points.items() if n < self.high}
        self.low = max(self._points, default=self.least - 1)

    @property
    def best(self) -> int | None:
        """Return the largest size that has fitted."""
        return max(self._points, default=None)

    def _meets(self) -> int | None:
        """Return the size at which the line through the two largest sizes that fit, or through one and its remainder,
        meets the room."""
        points = dict(self._points)
        if len(points) == 1 and self._base is not None:
            points[0] = self._base
        if len(points) < 2:
            return None
        first, last = sorted(points)[-2:]
        slope = points[last] - points[first]
        if slope <= 0:
            return None
        return first + (self.room - points[first]) * (last - first) // slope
