"""The result of a search for a batch size, with every trial that it ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt import _C
from memopt._C import Error
from memopt._runtime.results import Result
from memopt._runtime.table import ResultTable, paragraphs


@dataclass(frozen=True)
class Trial(Result):
    """The run of one size.

    `peak_bytes`: the most bytes of tensors that lived at once; `held_bytes`: the device memory needed for it, the
    memory of other processes included (on the CPU, the same as peak). If it ran out of memory, both count what it had
    allocated until then. `retries`: requests that the allocator could meet only after emptying its cache, the sign of a
    size that barely fits. `why`: the reason why it does not fit, "" if it does.
    """

    batch_size: int
    fits: bool
    steps: int
    peak_bytes: int
    held_bytes: int
    seconds: float
    retries: int = 0
    why: str = ""


@dataclass(frozen=True, repr=False)
class FoundBatchSize(Result):
    """A batch size that has been run, for `steps` steps in a row, and fits.

    Print it, or show it in a notebook: a table of all trials. int() gives the size. `stopped`: why no larger size was
    taken; `room_bytes`: the bytes that a step may take, with `headroom` of the device kept free; `notes`: other facts,
    such as recompilations.
    """

    batch_size: int
    device: str
    room_bytes: int
    total_bytes: int
    headroom: float
    stopped: str
    tried: list[Trial]
    seconds: float
    notes: list[str] = field(default_factory=list)

    def __int__(self) -> int:
        return self.batch_size

    __index__ = __int__

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors that live at once with this size."""
        return next(
            trial.peak_bytes
            for trial in reversed(self.tried)
            if trial.fits and trial.batch_size == self.batch_size
        )

    @property
    def samples(self) -> int:
        """The number of samples computed for the search; all trials are undone."""
        return sum(trial.batch_size * trial.steps for trial in self.tried)

    def __str__(self) -> str:
        return "\n".join(
            [self._headline(), *table(self.tried).lines(), *(f"  note: {note}" for note in self.notes)]
        )

    def _headline(self) -> str:
        kept = f", {self.headroom:.0%} kept free" if self.headroom else ""
        return (
            f"batch size {self.batch_size} on {self.device} ({_C.format_size(self.room_bytes)} may be used{kept}): "
            f"{self.stopped}; {len(self.tried)} trials, {self.seconds:.1f} s"
        )

    def _repr_html_(self) -> str:
        notes = (f"note: {note}" for note in self.notes)
        return paragraphs([self._headline()]) + table(self.tried).html() + paragraphs(notes)


class NoBatchSizeFits(Error):
    """Not even the smallest batch size fits. `least`: bytes that its step needs at least; `tried`: all trials."""

    def __init__(self, message: str, least: int, tried: list[Trial]) -> None:
        super().__init__(message)
        self.least, self.tried = least, tried


_HEADS = ("batch size", "", "peak", "held", "seconds", "")


def _cells(trial: Trial) -> tuple[str, ...]:
    said = [trial.why, f"the allocator had to retry {trial.retries} times" if trial.retries else ""]
    return (
        str(trial.batch_size),
        "fits" if trial.fits else "does not fit",
        _C.format_size(trial.peak_bytes),
        _C.format_size(trial.held_bytes),
        f"{trial.seconds:.2f}",
        ", ".join(filter(None, said)),
    )


def table(tried: list[Trial]) -> ResultTable:
    """Return the trials in the order in which they were run."""
    return ResultTable([_cells(trial) for trial in tried], _HEADS, left=(5,))
