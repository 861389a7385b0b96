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
    memory_budget: int | str | None = None,
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

    Sizes go up from `start` until one does not fit, at most to `maximum`; then the gap is closed, among the multiples
    of `multiple_of`. The size that is returned has been run itself, `steps` times in a row: the first step makes the
    optimizer's states, the second runs beside them. A size fits where nothing ran out of memory and where `headroom`
    stayed free at the peak, the allocator's cache and other processes counted as taken.

    Afterwards the parameters, buffers, gradients and modes of `model`, the states and groups of `optimizer`, `scaler`,
    what is in `stateful`, and the random states of Python, NumPy and torch are bit for bit what they were: they are
    kept on the host meanwhile, which takes as many bytes there. What else fn changes stays changed: pass a fixed batch,
    not a loader's next one. torch's peak counters begin anew.

    In a run of several ranks, search before the model is wrapped in DDP or sharded: one that is, is refused.

    Args:
        fn: One whole training step (data, forward, backward, optimizer.step, zero_grad) with a batch of that many
            samples. With `card`: a module, or a function of a sample that returns a loss.
        start: The size to begin with.
        maximum: The largest size to try.
        minimum: The least size that is of use.
        multiple_of: Try multiples of it alone.
        headroom: The part of the device that is to stay free.
        within: The part of the largest size by which the answer may be too small: by default a tenth of the headroom,
            so the very largest where there is none.
        memory_budget: The most bytes ("8GiB") of tensors that may live at once. On the CPU that is the only bound, by
            default what the host has free, and a try that exceeds it ends there.
        model: The module that is put back; like the next two one, several in a tuple, or None.
        optimizer: The optimizer that is put back; with `card` one or a class.
        scaler: The gradient scaler that is put back.
        stateful: Others that are put back: schedulers, generators.
        steps: The number of steps of each try.
        device: The device; the model's by default, else the current CUDA device, else the CPU.
        card: A GPU that is not here ("4090", "24GiB"): the answer is from memopt.estimate's simulated device. Each try
            is a run of `steps` steps in a child process, and nothing here is touched.
        sample: With `card` a batch of any size (first dimension).
        unprotected: With `card`, as memopt.estimate() takes it.

    Returns:
        A FoundBatchSize: .batch_size, .tried (each size with its bytes, and why it does not fit), .stopped; what it has
        cost is .samples and .seconds. Print it.

    Raises:
        NoBatchSizeFits: Not even `minimum` fits; it has the least bytes.
        ValueError: Arguments that make no sense, and a fn that does not use its argument.
        Exception: What fn raises, other than an out-of-memory error, after all is put back.

    Example:
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
        raise ValueError("sample= is for card=: a step that runs here makes its own batch")
    _refuse_ranks(_several(model))
    budget = None if memory_budget is None else _C.parse_size(memory_budget)
    models, optimizers, scalers = _several(model), _several(optimizer), _several(scaler)
    where = _device(device, models)
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
        room=memory.room,
        total=memory.total,
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
        """Run a size. Returns what it takes, None where it does not fit."""
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
        """The steps that were begun, what they took, and why they ended before the last."""
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
        """The first try makes what stays, so it asks for more than others do."""
        if len(self.tried) < 2 or not taken.asked:
            return
        self._asked[size] = taken.asked
        smallest = min(self._asked)
        if size >= 16 * smallest and self._asked[smallest] == taken.asked:
            raise ValueError(
                f"fn(batch_size) asks for the same {_C.format_size(taken.asked)} with {size} as with {smallest}: "
                "let it make its batch of the size that it is given"
            )


def _why_stopped(tried: list[Trial], above: int) -> str:
    failed = [trial for trial in tried if not trial.fits and trial.batch_size == above]
    return f"{above} does not fit: {failed[-1].why}" if failed else f"the maximum, below {above}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, BudgetExceeded):
        return str(error)
    asked = bytes_asked(error)
    if asked is not None:
        return f"out of memory where it asked for {_C.format_size(asked)}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def none_fits(tries: _Tries, memory: DeviceMemory) -> NoBatchSizeFits:
    smallest = min(tries.tried, key=lambda trial: trial.batch_size)
    least = tries.least
    return NoBatchSizeFits(
        f"no batch size fits on {memory.name}: a step with {smallest.batch_size} takes at least "
        f"{_C.format_size(least)} ({least} bytes), and {_C.format_size(memory.room)} may be taken of "
        f"{_C.format_size(memory.total)} ({smallest.why}). See memopt.auto_checkpoint, which computes again what it "
        "does not keep, and memopt.estimate, which says where the memory goes",
        least,
        tries.tried,
    )


def _notes(tries: _Tries, compilations: int) -> list[str]:
    notes = []
    if compilations:
        notes.append(
            f"torch.compile compiled {compilations} times for {len(tries.tried)} sizes: each is a shape of its own "
            "until one is marked as dynamic, and after torch._dynamo.config.recompile_limit of them it compiles no "
            "more; torch.compiler.reset() begins anew"
        )
    if any(trial.retries for trial in tries.tried if trial.fits):
        notes.append("the allocator emptied its cache in mid-step with some sizes that fit: they run, slowly")
    return notes


def _compilations() -> int:
    """Graphs that torch.compile has made so far in this process."""
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
        raise TypeError(f"fn is called with a batch size, and {type(fn).__name__} cannot be called")
    numbers = {
        "start": start, "maximum": maximum, "minimum": minimum, "multiple_of": multiple_of, "steps": steps
    }  # fmt: skip
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is no number of samples or steps: write 1 or more")
    if maximum // multiple_of < -(-minimum // multiple_of):
        raise ValueError(f"no multiple of {multiple_of} lies between minimum={minimum} and maximum={maximum}")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom!r} is no part of a device: write 0.05 for a twentieth of it")
    if not 0 <= within < 1:
        raise ValueError(f"within={within!r} is no part of a batch size: write 0 for the very largest")


def _refuse_ranks(models: list[torch.nn.Module]) -> None:
    """A try that runs out of memory on one rank leaves the others in a collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds = {kind.__name__ for model in models for part in model.modules() for kind in type(part).__mro__}
    found = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    if found and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"model is {found.pop()}'s, and a try that runs out of memory on one rank would leave the others waiting: "
            "search with the module before it is wrapped, in a step without collectives, or use memopt.estimate"
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
    """bounds: start, least and most, in units. ValueError for a card that is none, or a sample without a batch."""
    from memopt._estimate import cards, model

    whole = cards.card(card)
    room = int((1 - headroom) * whole.usable)
    limited = cards.Card(whole.name, room, whole.compute_capability, whole.multiprocessors, whole.context)
    size = model.batch_of(sample)
    if size is None:
        raise ValueError("card=: pass sample=, a batch of any size, whose first dimension is the batch's")
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
        why = "" if fits else f"{_C.format_size(told.needed[1])} needed"
        peak, held = told.peak[1], told.needed[1]
        tried.append(Trial(count, fits, told.steps, peak, held, time.perf_counter() - since, why=why))
        notes[f"by memopt.estimate, on {told.method}"] = None
        if fits:
            bracket.fits(probe, held)
        else:
            bracket.fails(probe)
    if bracket.best is None:
        smallest = min(tried, key=lambda trial: trial.batch_size)
        raise NoBatchSizeFits(
            f"no batch size fits on {whole}: a step with {smallest.batch_size} takes {smallest.held} bytes, and "
            f"{_C.format_size(room)} may be taken",
            smallest.held,
            tried,
        )
    return FoundBatchSize(
        batch_size=bracket.best * unit,
        device=whole.name,
        room=room,
        total=whole.usable,
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
        """The size to try; None when low is the answer."""
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
        """taken: bytes of the room; left: those of it that stay when the step is over, as if it had no samples."""
        if left is not None and left < taken:
            self._base = left
        self._next = None
        self._points[size] = taken
        self.low = max(self.low, size)

    def fails(self, size: int) -> None:
        """Also of a size that fitted once, and does not any more."""
        self._next = None
        self.high = min(self.high, size)
        self._points = {n: taken for n, taken in self._points.items() if n < self.high}
        self.low = max(self._points, default=self.least - 1)

    @property
    def best(self) -> int | None:
        """The largest that has fitted."""
        return max(self._points, default=None)

    def _meets(self) -> int | None:
        """The size at which the line through the two largest that fit, or through one and its rest, meets the room."""
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
