"""What `memopt.data.tune` found."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt.data.loader_settings import Settings, with_settings
from memopt.data.tuning_trial import Trial

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
    """What was measured, a row a trial, and what is proposed. `.loader()` makes the loader; `.proposal` are the
    arguments; `.trials` the rows. It prints as a table, and shows as one in a notebook."""

    proposal: Settings
    """Of DataLoader's arguments."""
    current: Settings
    """The loader's own."""
    trials: list[Trial]
    budget: int
    """Bytes that the loader could take beyond what the process had."""
    budget_is: str
    """Where that comes from, in words."""
    reason: str
    """Why this is proposed, in words."""
    notes: list[str] = field(default_factory=list)
    _loader: DataLoader[Any] | None = field(default=None, repr=False)

    def loader(self) -> DataLoader[Any]:
        """A loader with what is proposed, in all else the one that was tuned: class, data set, sampler, batch_sampler,
        collate_fn, worker_init_fn, generator, timeout, drop_last, multiprocessing_context, in_order and whatever else
        it has, the objects themselves. The old one stays as it is; iterate one of the two."""
        assert self._loader is not None
        return with_settings(self._loader, self.proposal)

    @property
    def rows(self) -> list[list[str]]:
        return [_row(trial) for trial in self.trials]

    def __str__(self) -> str:
        table = [_HEADS, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEADS) - 1)]
        lines = [
            "  ".join(
                [*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
            ).rstrip()
            for row in table
        ]
        return "\n".join(
            [*lines, self._memory_line, *self.notes, f"proposed: {self.proposal} ({self.reason})"]
        )

    @property
    def _memory_line(self) -> str:
        return (
            f"budget {_C.format_size(self.budget)} ({self.budget_is}); memory: of all processes, beyond what this one "
            "had, batches under way included; files: page cache, which the kernel takes back when it wants it"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cells(row: list[str], kind: str) -> str:
            return "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        said = [f"proposed: {self.proposal} ({self.reason})", self._memory_line, *self.notes]
        below = "".join(f"<p>{html.escape(line)}</p>" for line in said)
        return f"<table><thead><tr>{cells(_HEADS, 'th')}</tr></thead><tbody>{body}</tbody></table>{below}"


def _row(trial: Trial) -> list[str]:
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
