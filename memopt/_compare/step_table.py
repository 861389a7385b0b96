"""Savings and costs of a step's variants, as text, a table in a notebook, bars, or numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime.results import Result
from memopt._runtime.table import Html, ResultTable, paragraphs, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As the report page has them, in light colours.
COLOURS = {
    "parameters": "#334f9f",
    "gradients": "#d97d11",
    "optimizer": "#29a58f",
    "activations": "#cf432a",
    "inputs": "#64205c",
    "other": "#606a73",
}


# Steps under the recorder: the first lets an optimizer make its state, the second is an ordinary one.
RECORDED = 2


@dataclass(frozen=True)
class MeasuredStep(Result):
    """The measurements of one variant.

    `peak_bytes`: the most bytes allocated by the variant that lived at once during the steps; `by_category` divides
    them by category and adds up to `peak_bytes`. `building_bytes`: the same while the variant was built. `held_bytes`:
    the most device memory that the CUDA allocator held, None on the CPU. `resident_bytes`: the largest growth of the
    process in bytes, if the variant had a process of its own.

    `seconds`: the time of each timed step; none on a simulated device, where they mean nothing. `losses`: the loss of
    every step; none if steps return none. `failed`: the beginning of the out-of-memory error that ended it, "" if there
    was none."""

    peak_bytes: int
    by_category: dict[str, int]
    building_bytes: int
    held_bytes: int | None
    resident_bytes: int | None
    seconds: list[float]
    losses: list[float]
    failed: str = ""

    @property
    def step_seconds(self) -> float | None:
        """The median of the seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The quartiles of the seconds: half of the steps took between these."""
        if not self.seconds:
            return None
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.losses[-1] if self.losses else None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {**asdict(self), "step_seconds": self.step_seconds, "loss": self.loss}


@dataclass(frozen=True, repr=False)
class StepComparison(Result):
    """Result of compare_steps(). `measured` has the results by variant name; the others are compared with the first."""

    measured: dict[str, MeasuredStep]
    steps: int
    device: str

    def __getitem__(self, name: str) -> MeasuredStep:
        return self.measured[name]

    @property
    def base(self) -> str:
        return next(iter(self.measured))

    def saved(self, name: str) -> float | None:
        """Return the share of the first variant's peak that this one saves.

        Args:
            name: The variant.

        Returns:
            A share, negative if it needs more; None if one of the two ran out of memory.
        """
        mine, other = self.measured[name], self.measured[self.base]
        if mine.failed or other.failed or not other.peak_bytes:
            return None
        return 1 - mine.peak_bytes / other.peak_bytes

    def time_ratio(self, name: str) -> float | None:
        """Return the median seconds of a step over the first variant's.

        Args:
            name: The variant.

        Returns:
            None if one has no times, or if the middle halves of both overlap: the difference is within the noise.
        """
        mine, other = self.measured[name].quartiles, self.measured[self.base].quartiles
        if mine is None or other is None or (mine[0] <= other[1] and other[0] <= mine[1]):
            return None
        own, first = self.measured[name].step_seconds, self.measured[self.base].step_seconds
        assert own is not None and first
        return own / first

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values: bytes, seconds and losses, as measured."""
        rows = {
            name: {**one.as_dict(), "saved": self.saved(name), "time_ratio": self.time_ratio(name)}
            for name, one in self.measured.items()
        }
        return {"device": self.device, "steps": self.steps, "variants": rows}

    # ---- reading ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        columns = self._columns()
        lines = ResultTable([*zip(*columns.values(), strict=True)], [*columns]).lines(gap="   ")
        return "\n".join([self._title(), *lines, *(f"  {note}" for note in self._notes())])

    def _repr_html_(self) -> str:
        """Return static HTML: no script, and no style except that of its cells."""
        columns = self._columns()
        most = max(one.peak_bytes for one in self.measured.values()) or 1
        columns["what the peak is made of"] = [_bar(one, most) for one in self.measured.values()]
        table = ResultTable([*zip(*columns.values(), strict=True)], [*columns])
        legend = Html(_legend(self.measured))
        return paragraphs([self._title(), *self._notes()]) + table.html() + paragraphs([legend])

    def plot(self) -> Figure:
        """Return a matplotlib Figure: bars of the peak by category and, for timed variants, of a step's seconds.

        The bars of seconds show the interquartile range.

        Raises:
            ImportError: matplotlib is missing: pip install "memopt[notebook]".
        """
        from memopt._compare import plots

        return plots.step_bars(self)

    def _title(self) -> str:
        what = "a simulated device" if self._untimed() else self.device
        timed = "" if self._untimed() else "; the median time of the others"
        return (
            f"{self.steps} steps each on {what}: live bytes of what a variant made, at the peak of {RECORDED} "
            f"steps{timed}"
        )

    def _untimed(self) -> bool:
        return not any(one.seconds for one in self.measured.values())

    def _columns(self) -> dict[str, list[str]]:
        """Return the cells by column title."""
        size = _C.format_size
        rows: Mapping[str, MeasuredStep] = self.measured
        columns = {
            "": list(rows),
            "peak": ["out of memory" if one.failed else size(one.peak_bytes) for one in rows.values()],
            "saved": [self._saved(name) for name in rows],
        }
        if any(one.held_bytes is not None for one in rows.values()):
            held = [size(one.held_bytes) if one.held_bytes is not None else "" for one in rows.values()]
            columns["allocator held"] = held
        if any(one.resident_bytes is not None for one in rows.values()):
            grown = [
                size(one.resident_bytes) if one.resident_bytes is not None else "" for one in rows.values()
            ]
            columns["process grew by"] = grown
        if not self._untimed():
            columns["a step"] = [
                seconds_text(one.step_seconds) if one.step_seconds else "" for one in rows.values()
            ]
            columns["time"] = [self._time(name) for name in rows]
        if any(one.losses for one in rows.values()):
            losses = ["" if one.loss is None or one.failed else f"{one.loss:.4f}" for one in rows.values()]
            columns["last loss"] = losses
        return columns

    def _saved(self, name: str) -> str:
        share = self.saved(name)
        return "" if share is None or name == self.base else f"{round(share, 2) + 0.0:.0%}"  # + 0.0: no "-0%"

    def _time(self, name: str) -> str:
        if name == self.base or not self.measured[name].seconds or not self.measured[self.base].seconds:
            return ""
        ratio = self.time_ratio(name)
        return "within the noise" if ratio is None else f"{ratio:.2f} x"

    def _notes(self) -> list[str]:
        return [f"{name}: {one.failed}" for name, one in self.measured.items() if one.failed] + [
            f"{name}: building it took {_C.format_size(one.building_bytes)} temporarily, more than its steps"
            for name, one in self.measured.items()
            if one.building_bytes > one.peak_bytes and not one.failed
        ]


def _bar(one: MeasuredStep, most: int) -> Html:
    parts = "".join(
        f"<div title='{name} {_C.format_size(size)}' "
        f"style='background:{COLOURS[name]};width:{240 * size / most:.1f}px'></div>"
        for name, size in one.by_category.items()
        if size
    )
    return Html(f"<div style='display:flex;height:14px'>{parts}</div>")


def _legend(measured: Mapping[str, MeasuredStep]) -> str:
    return " &nbsp; ".join(
        f"<span style='display:inline-block;width:10px;height:10px;background:{colour}'></span> {name}"
        for name, colour in COLOURS.items()
        if any(one.by_category[name] for one in measured.values())
    )
