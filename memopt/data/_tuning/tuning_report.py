"""Result of `memopt.data.tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime.table import ResultTable, paragraphs
from memopt.data._tuning.loader_settings import Settings, with_settings
from memopt.data._tuning.tuning_trial import LoaderTrial

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

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
class Tuning:
    """The result of `memopt.data.tune`: a row for each trial, and the proposed settings. It prints as a table."""

    proposal: Settings
    """Of DataLoader's arguments."""
    current: Settings
    """The loader's own."""
    trials: list[LoaderTrial]
    budget: int
    """Bytes that the loader could take beyond what the process had."""
    budget_is: str
    """Source of the budget, in words."""
    reason: str
    """Reason of the proposal, in words."""
    notes: list[str] = field(default_factory=list)
    _loader: DataLoader[Any] | None = field(default=None, repr=False)

    def loader(self) -> DataLoader[Any]:
        """Make a loader with the proposed settings.

        Everything else is the tuned loader's, the objects themselves: class, dataset, sampler, batch_sampler,
        collate_fn, worker_init_fn, generator, timeout, drop_last, multiprocessing_context, in_order and the rest. The
        old loader stays as it is; iterate one of the two.
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
            f"budget {_C.format_size(self.budget)} ({self.budget_is}); memory: of all processes, beyond what this one "
            "had, batches under way included; files: page cache, which the kernel takes back when it wants it"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = [f"proposed: {self.proposal} ({self.reason})", self._memory_line, *self.notes]
        return self._table.html() + paragraphs(said)


def _row(trial: LoaderTrial) -> list[str]:
    settings, show = trial.settings, _C.format_size
    measured = trial.batches > 0 or trial.own > 0
    return [
        str(settings.num_workers),
        "-" if settings.prefetch_factor is None else str(settings.prefetch_factor),
        "yes" if settings.pin_memory else "no",
        "yes" if settings.persistent_workers else "no",
        "-" if trial.rate is None else f"{trial.rate:.4g}",
        "-" if trial.start is None else f"{trial.start:.3g} s",
        "-" if trial.again is None else f"{trial.again:.3g} s",
        show(trial.own) if measured else "-",
        show(trial.file) if measured else "-",
        trial.problem or trial.note,
    ]
