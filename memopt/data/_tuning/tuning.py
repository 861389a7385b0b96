"""memopt.data.tune: a DataLoader's settings by measurement, within a budget of the host's memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime import arguments
from memopt._runtime.host_memory import available
from memopt._runtime.log import logger
from memopt._runtime.results import Result
from memopt._runtime.table import ResultTable, paragraphs
from memopt._runtime.torch_version import require
from memopt.data._tuning import tuning_trial
from memopt.data._tuning.tuning_trial import Bounds, LoaderTrial, Settings, with_settings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_USED_AT_MOST = 0.9  # of what is free, where no budget is given
_AS_FAST = 0.95  # of the fastest is as fast: what is measured in seconds varies so much
_FASTER = 1.05
_SPARE = 1.1  # over what a training step needs
_TURN_SECONDS = 0.05  # that persistent workers have to save an epoch


def tune(
    loader: Any,
    memory_budget: int | float | str | None = None,
    *,
    seconds: float = 5.0,
    batches: int = 200,
    startup: float = 60.0,
    workers: Iterable[int] | None = None,
    step_seconds: float | None = None,
    ram: int | str | None = None,
) -> Tuning:
    """Find a DataLoader's settings by measurement, within a budget of the host's memory.

    It tries num_workers, prefetch_factor, pin_memory and persistent_workers, and proposes the settings with the least
    memory among those that are as fast as the fastest. Each trial really iterates the loader, in a fork of this process
    that ends with the trial: the loader, its dataset, the state of samplers and generators and the random state of this
    process do not change. Map-style and iterable datasets, any start method and subclasses of DataLoader such as
    torchdata's StatefulDataLoader are supported. It needs Linux.

    Memory is that of the trial's processes (PSS: of a page that n of them share, an nth each; copies that workers make
    by reading a list's objects are included) and shared memory with the batches in transit. Mapped files are shown
    separately, because they are page cache. Numbers of workers that would not fit, judging by smaller numbers, are not
    tried. Memory is sampled every 10 ms or a little more. A trial is stopped when its memory, plus its growth between
    two of the last samples, would not fit.

    A setting that fails (a worker dies, a dataset cannot be pickled to spawned workers, no batch arrives) has a row
    that says so. pin_memory is tried if an accelerator can be used in a fork; otherwise it is not changed. The fork
    reads only one byte of each page of a batch, so that it takes memory, with one torch thread. Each trial of a stream
    starts at the loader's current position.

    Args:
        loader: A torch DataLoader.
        memory_budget: The most memory that loading may take beyond what this process already has: bytes, "8GiB", or a
            fraction (a float) of the free memory. None: nine tenths of the memory that the host, or the tightest cgroup
            around this process, has free, divided by LOCAL_WORLD_SIZE; a larger value is reduced to that.
        seconds: Duration of a trial, from the first batch on.
        batches: The most batches in a trial (plus three times those that workers have in progress).
        startup: Seconds to wait for the first batch.
        workers: Numbers of workers to try. Default: 0, 1, 2, 4, … up to the CPUs that this process may use, and the
            loader's own; more are tried as long as they help.
        step_seconds: Duration of a training step: the smallest settings are proposed that deliver batches 1.1 times as
            fast.
        ram: The earlier name of memory_budget.

    Returns:
        A table of all measurements, and the proposal. `.loader()` makes the loader.

    Raises:
        TypeError: `loader` is not a DataLoader.
        ValueError: An argument is out of range.

    Examples:
        >>> found = memopt.data.tune(loader, memory_budget="8GiB")
        >>> loader = found.loader()
    """
    require("memopt.data.tune()")
    if ram is not None:
        warnings.warn(
            "the argument ram= of tune() is now named memory_budget=", DeprecationWarning, stacklevel=2
        )
        memory_budget = ram if memory_budget is None else memory_budget
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"memopt.data.tune: a {type(loader).__qualname__} is not a torch DataLoader: give the DataLoader itself, "
            "before it is wrapped"
        )
    for name, value in (("seconds", seconds), ("batches", batches), ("startup", startup)):
        if not value > 0:
            raise ValueError(f"memopt.data.tune: {name}={value} must be more than 0")
    if step_seconds is not None and not step_seconds > 0:
        raise ValueError(f"memopt.data.tune: step_seconds={step_seconds} must be more than 0")
    counts = _ladder(loader.num_workers) if workers is None else sorted(set(workers))
    if not counts or any(not isinstance(one, int) or one < 0 for one in counts):
        raise ValueError(f"memopt.data.tune: workers={counts}: expected numbers of workers, 0 or more")
    budget, budget_is = _budget(memory_budget)
    search = _Search(loader, Bounds(seconds, batches, startup, budget), step_seconds)
    search.workers(counts)
    search.prefetch()
    search.pinned()
    search.persistent()
    proposal, reason = search.proposal()
    found = Tuning(proposal, search.current, search.trials, budget, budget_is, reason, search.notes, loader)
    logger.info("%s", found)
    return found


def _ranks_here() -> int:
    """Return the number of processes of the same job on this machine, which share its memory."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(said)) if said.isdecimal() else 1


def _budget(memory_budget: int | float | str | None) -> tuple[int, str]:
    ranks = _ranks_here()
    free = available(swap=False)
    part = None if free is None else int(_USED_AT_MOST * free) // ranks
    among = f", {ranks} ranks share it" if ranks > 1 else ""
    if part is None and (memory_budget is None or isinstance(memory_budget, float)):
        raise ValueError(
            "memopt.data.tune: the amount of free memory is not known here; give memory_budget= in bytes"
        )
    if memory_budget is None:
        return part or 0, f"nine tenths of the {_C.format_size(free or 0)} that are free{among}"
    asked = arguments.fraction_or_size(memory_budget, "memory_budget", lambda: (free or 0) // ranks)
    if asked == 0:
        raise ValueError("memopt.data.tune: memory_budget=0 is too little for any loader")
    if part is not None and asked > part:
        return (
            part,
            f"memory_budget={memory_budget} is more than nine tenths of the {_C.format_size(free or 0)} that are free"
            + among,
        )
    return asked, f"memory_budget={memory_budget}"


def _ladder(current: int) -> list[int]:
    cpus = max(1, len(os.sched_getaffinity(0)) // _ranks_here())
    powers = [2**n for n in range(cpus.bit_length()) if 2**n <= cpus]
    return sorted({0, *powers, cpus, current})


class _Search:
    """The trials, in their order, and what follows from them."""

    def __init__(self, loader: Any, bounds: Bounds, step_seconds: float | None) -> None:
        self.loader, self.bounds, self.step_seconds = loader, bounds, step_seconds
        self.current = Settings.of(loader)
        self.trials: list[LoaderTrial] = []
        self.notes: list[str] = []
        self.pins = self.current.pin_memory
        self.persists: bool | None = None

    def workers(self, counts: list[int]) -> None:
        # One after the other from few to many: what few take says what more would.
        without_gain = 0
        for count in counts:
            settings = self.current.with_workers(count)._replace(persistent_workers=False)
            expected = self._expected(count)
            if expected is not None and expected > self.bounds.budget:
                self.trials.append(
                    LoaderTrial(settings, problem=f"not tried: would take about {_C.format_size(expected)}")
                )
                return
            best = max((one.rate or 0.0 for one in self._rated()), default=0.0)
            trial = self._try(settings)
            # What stops or fails with a few does so with more; without workers a dataset may fail alone.
            if (trial.problem and count) or self._enough(trial):
                return
            without_gain = 0 if (trial.rate or 0.0) > _FASTER * best else without_gain + 1
            if without_gain == 2 and count >= self.current.num_workers:
                return

    def prefetch(self) -> None:
        best = self._best()
        if best is None or not best.settings.num_workers:
            return
        for ahead in (1, 4):
            if ahead == best.settings.prefetch_factor:
                continue
            settings = best.settings._replace(prefetch_factor=ahead)
            more = best.batch_bytes * (settings.outstanding - best.settings.outstanding)
            if best.own_bytes + more > self.bounds.budget:
                size = _C.format_size(best.own_bytes + more)
                self.trials.append(LoaderTrial(settings, problem=f"not tried: would take about {size}"))
            else:
                self._try(settings)

    def pinned(self) -> None:
        best = self._best()
        kind = tuning_trial.accelerator_of_a_fork()
        if kind is None:
            self.notes.append("pin_memory is left unchanged: there is no accelerator here")
        elif kind == tuning_trial.UNFIT:
            self.notes.append(
                "pin_memory is left unchanged: this process has already queried CUDA's devices, and a forked child "
                "cannot use them; tune before torch.cuda.is_available() is called and before anything is on the GPU"
            )
        elif kind == tuning_trial.SILENT:
            self.notes.append(
                "pin_memory is left unchanged: a forked child that queried the accelerator did not answer"
            )
        elif best is not None:
            plain, pinned = (
                self._try(best.settings._replace(pin_memory=pin), device=kind) for pin in (False, True)
            )
            if pinned.complete and plain.complete:
                self.pins = (pinned.rate or 0.0) > _FASTER * (plain.rate or 0.0)
            elif pinned.problem:
                self.pins = False

    def persistent(self) -> None:
        best = self._best()
        if best is None or not best.settings.num_workers:
            return
        anew, kept = (
            self._try(best.settings._replace(persistent_workers=keep), epochs=True) for keep in (False, True)
        )
        if anew.again is None or kept.again is None or kept.problem:
            return
        saved = anew.again - kept.again
        self.persists = saved > _TURN_SECONDS
        if (
            self.persists
            and not self.current.persistent_workers
            and hasattr(self.loader.dataset, "set_epoch")
        ):
            self.persists = False
            self.notes.append(
                f"persistent_workers would save {saved:.3g} s an epoch, but persistent workers do not see the "
                "dataset's set_epoch()"
            )

    def proposal(self) -> tuple[Settings, str]:
        best = self._best()
        if best is None:
            return self.current, "the loader's own settings: nothing else could be measured within the budget"
        settings = best.settings._replace(pin_memory=self.pins)
        if settings.num_workers:
            keeps = self.current.persistent_workers if self.persists is None else self.persists
            settings = settings._replace(persistent_workers=keeps)
        now = next(
            (one for one in self._rated() if one.settings.num_workers == self.current.num_workers), None
        )
        beside = (
            f", {best.rate / now.rate:.2f} times the loader's own"
            if now is not None and now is not best and now.rate and best.rate
            else ""
        )
        if self.step_seconds is not None:
            enough = (
                "the smallest that keeps up" if self._enough(best) else "the fastest, but it does not keep up"
            )
            why = f"{enough} with a step of {self.step_seconds:g} s"
        else:
            why = "the least memory among those as fast as the fastest"
        return settings, f"{why}: {best.rate:.4g} batches/s in {_C.format_size(best.own_bytes)}{beside}"

    def _try(self, settings: Settings, *, epochs: bool = False, device: str | None = None) -> LoaderTrial:
        trial = tuning_trial.measure(self.loader, settings, self.bounds, epochs=epochs, device=device)
        if device is not None:
            trial.note = trial.note or f"copied to {device}"
        self.trials.append(trial)
        return trial

    def _rated(self) -> list[LoaderTrial]:
        """Return the trials that can be compared with one another: those of loading alone."""
        return [
            one for one in self.trials if one.complete and one.rate and not one.note.startswith("copied to")
        ]

    def _expected(self, count: int) -> int | None:
        """Return the bytes expected with so many workers, on the line through the last two trials."""
        known = [one for one in self.trials if one.complete and one.settings.num_workers]
        if len(known) < 2:
            return None
        one, other = known[-2:]
        each = (other.own_bytes - one.own_bytes) / (other.settings.num_workers - one.settings.num_workers)
        return int(other.own_bytes + each * (count - other.settings.num_workers))

    def _enough(self, trial: LoaderTrial) -> bool:
        return (
            self.step_seconds is not None
            and trial.complete
            and (trial.rate or 0.0) * self.step_seconds >= _SPARE
        )

    def _best(self) -> LoaderTrial | None:
        """Return the trial with the least memory of those that are fast enough."""
        rated = self._rated()
        if not rated:
            return None
        enough = [one for one in rated if self._enough(one)]
        if not enough:
            fastest = max(one.rate or 0.0 for one in rated)
            enough = [one for one in rated if (one.rate or 0.0) >= _AS_FAST * fastest]
        return min(enough, key=lambda one: (one.own_bytes, one.settings.num_workers))


# ---- the result ------------------------------------------------------------------------------------------------------


_HEADS = [
    "workers",
    "prefetch",
    "pinned",
    "persistent",
    "batches/s",
    "first batch",
    "next epoch's",
    "memory",
    "files",
    "",
]


@dataclass(repr=False)
class Tuning(Result):
    """The result of `memopt.data.tune`: a row for each trial, and the proposed settings. It prints as a table."""

    proposal: Settings
    """Of DataLoader's arguments."""
    current: Settings
    """The loader's own."""
    trials: list[LoaderTrial]
    budget_bytes: int
    """Bytes that the loader could take beyond what the process had."""
    budget_is: str
    """Source of the budget, in words."""
    reason: str
    """Reason of the proposal, in words."""
    notes: list[str] = field(default_factory=list)
    _loader: DataLoader[Any] | None = field(default=None, repr=False)

    def loader(self) -> DataLoader[Any]:
        """Make a loader with the proposed settings.

        Everything else is taken from the tuned loader, the same objects: class, dataset, sampler, batch_sampler,
        collate_fn, worker_init_fn, generator, timeout, drop_last, multiprocessing_context, in_order and the rest. The
        old loader is not changed; iterate only one of the two.
        """
        assert self._loader is not None
        return with_settings(self._loader, self.proposal)

    @property
    def rows(self) -> list[list[str]]:
        return [_row(trial) for trial in self.trials]

    def __str__(self) -> str:
        said = [self._memory_line, *self.notes, f"proposed: {self.proposal} ({self.reason})"]
        return "\n".join([*self._table.lines(indent=""), *said])

    @property
    def _table(self) -> ResultTable:
        return ResultTable(self.rows, _HEADS, left=(len(_HEADS) - 1,))

    @property
    def _memory_line(self) -> str:
        return (
            f"budget {_C.format_size(self.budget_bytes)} ({self.budget_is}); memory: of all processes, beyond the "
            "initial memory of this one, batches in flight included; files: page cache, which the kernel reclaims when "
            "needed"
        )

    def _repr_html_(self) -> str:
        said = [f"proposed: {self.proposal} ({self.reason})", self._memory_line, *self.notes]
        return self._table.html() + paragraphs(said)


def _row(trial: LoaderTrial) -> list[str]:
    settings, show = trial.settings, _C.format_size
    measured = trial.batches > 0 or trial.own_bytes > 0
    return [
        str(settings.num_workers),
        "-" if settings.prefetch_factor is None else str(settings.prefetch_factor),
        "yes" if settings.pin_memory else "no",
        "yes" if settings.persistent_workers else "no",
        "-" if trial.rate is None else f"{trial.rate:.4g}",
        "-" if trial.start is None else f"{trial.start:.3g} s",
        "-" if trial.again is None else f"{trial.again:.3g} s",
        show(trial.own_bytes) if measured else "-",
        show(trial.file_bytes) if measured else "-",
        trial.problem or trial.note,
    ]
