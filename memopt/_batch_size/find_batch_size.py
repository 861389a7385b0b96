"""memopt.find_batch_size(): the largest batch size whose step fits, by running steps, all of which are undone."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memopt import _C
from memopt._batch_size.bracket import Bracket
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
        from memopt._batch_size.on_card import on_card

        bounds = (start // multiple_of, -(-minimum // multiple_of), maximum // multiple_of)
        return on_card(fn, sample, card, optimizer, bounds, multiple_of, headroom, within, steps, unprotected)
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
        stopped=tries.why_stopped(bracket.high * unit),
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

    def why_stopped(self, above: int) -> str:
        failed = [trial for trial in self.tried if not trial.fits and trial.batch_size == above]
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
