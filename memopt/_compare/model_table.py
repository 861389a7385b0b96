"""Result of compare_models(), as text, a table in a notebook, a plot, or numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._estimate.prediction import span
from memopt._runtime.results import Result
from memopt._runtime.table import Html, ResultTable, paragraphs, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memopt._estimate.cards import Card

MEASURED, ESTIMATED = "measured", "estimated"
KEYS = ("peak", "time", "flops", "parameters", "bytes", "score", "name")


@dataclass
class ModelFigures(Result):
    """The figures of one model.

    parameters: their number; bytes: of parameters and buffers, each storage counted once. peak_bytes, needed_bytes:
    (low, high), of tensors, and of a card with the context. flops_forward, flops: of the forward and of a step.
    seconds: of a step; spread: (least, most) over the rounds. errors: by figure, why there is none. None: not
    known."""

    name: str
    parameters: int | None = None
    bytes: int | None = None
    peak_bytes: tuple[int, int] | None = None
    needed_bytes: tuple[int, int] | None = None
    method: str = ""
    flops_forward: int | None = None
    flops: int | None = None
    seconds: float | None = None
    spread: tuple[float, float] | None = None
    score: float | None = None
    errors: dict[str, str] = field(default_factory=dict)

    def fails(self, what: str, error: Exception) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        self.errors[what] = f"{type(error).__name__}: {first}"

    def value(self, key: str) -> float | None:
        """Return the value to minimise, the negative of a score."""
        if key == "peak":
            return None if self.peak_bytes is None else self.peak_bytes[1]
        if key == "score":
            return None if self.score is None else -self.score
        return getattr(self, "seconds" if key == "time" else key)  # type: ignore[no-any-return]


@dataclass(repr=False)
class ModelComparison(Result):
    """Result of compare_models(). Print it; in a notebook it is a table.

    `rows` has the rows by model name, in the order given; iteration yields them sorted."""

    rows: dict[str, ModelFigures]
    sort: str = "peak"
    time: str | None = MEASURED
    machine: str | None = None
    batch: int | None = None
    optimizer: str | None = None
    amp: str | None = None
    train: bool = True

    def __getitem__(self, name: str) -> ModelFigures:
        return self.rows[name]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ModelFigures]:
        return iter(self.sorted())

    def sorted(self, by: str | None = None) -> list[ModelFigures]:
        """Return the comparison sorted by a key, the best first and rows without that figure last.

        Args:
            by: A key as `sort` of compare_models() takes it; by default the current one.

        Raises:
            ValueError: There is no such key.
        """
        key = self.sort if by is None else by
        _known(key)
        if key == "name":
            return sorted(self.rows.values(), key=lambda row: row.name)
        known = [row for row in self.rows.values() if row.value(key) is not None]
        known.sort(key=lambda row: row.value(key) or 0)
        return known + [row for row in self.rows.values() if row.value(key) is None]

    def pareto(self, *keys: str) -> list[str]:
        """Return the names of the models on the Pareto front of the keys, sorted by the first key.

        Args:
            *keys: Keys as `sort` takes them; by default peak, time (FLOPs without times), and score if there are
                scores.
        """
        chosen = keys or self._axes()
        for key in chosen:
            _known(key)
        if "name" in chosen:
            raise ValueError("pareto: names have no order: give figures")
        known = [row for row in self.sorted(chosen[0]) if all(row.value(key) is not None for key in chosen)]
        points = {row.name: [row.value(key) for key in chosen] for row in known}
        return [name for name, mine in points.items() if not any(_beats(o, mine) for o in points.values())]

    def fits(self, card: str | int | Card) -> list[str]:
        """Return the names of the models that are sure to train on a card; its CUDA context is counted.

        Args:
            card: A size or a name: "24GiB", "a100-40".
        """
        from memopt._estimate import cards

        there = card if isinstance(card, cards.Card) else cards.card(card)
        return [
            row.name
            for row in self
            if row.needed_bytes is not None and row.needed_bytes[1] <= there.usable_bytes
        ]  # fmt: skip

    def _axes(self) -> tuple[str, ...]:
        second = "time" if any(row.seconds is not None for row in self.rows.values()) else "flops"
        scored = any(row.score is not None for row in self.rows.values())
        return ("peak", second, "score") if scored else ("peak", second)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, in bytes, FLOPs and seconds."""
        return {
            "batch": self.batch,
            "optimizer": self.optimizer,
            "amp": self.amp,
            "train": self.train,
            "time": self.time,
            "machine": self.machine,
            "sort": self.sort,
            "pareto": self.pareto(),
            "models": {row.name: asdict(row) for row in self},
        }

    def plot(self, x: str = "", y: str = "peak") -> Figure:
        """Return a matplotlib Figure: a circle for each model, its area the number of parameters, and the Pareto front.

        Args:
            x: Key of the horizontal axis; by default the time, or FLOPs without times.
            y: Key of the vertical axis.

        Raises:
            ImportError: matplotlib is missing: pip install "memopt[notebook]".
        """
        from memopt._compare import plots

        chosen = x or self._axes()[1]
        for key in (chosen, y):
            _known(key)
        return plots.scatter(self, chosen, y)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        titles, rows = self._cells()
        lines = ResultTable(rows, titles).lines(gap="   ")
        return "\n".join([self._title(), *lines, *(f"  {note}" for note in self._notes())])

    def _repr_html_(self) -> str:
        titles, rows = self._cells()
        front = set(self.pareto())
        for figures, row in zip(self, rows, strict=True):
            if figures.name in front:
                row[0] = Html(f"<b>{escape(row[0])}</b>")
        return paragraphs([self._title(), *self._notes()]) + ResultTable(rows, titles).html()

    def _title(self) -> str:
        batch = "" if self.batch is None else f", a batch of {self.batch}"
        if not self.train:
            what = "a forward pass"
        else:
            what = (
                f"a training step with {self.optimizer}" if self.optimizer else "a forward and backward pass"
            )
        amp = f" in {self.amp}" if self.amp else ""
        return f"{len(self.rows)} models, {what}{amp}{batch}; by {self.sort}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        scored = any(row.score is not None for row in self.rows.values())
        front = set(self.pareto())
        titles = ["", "parameters", "their bytes", "peak", "FLOPs"]
        titles += ["time"] if self.time is not None else []
        titles += ["score"] if scored else []
        rows = []
        for row in self:
            cells = [
                f"{row.name} *" if row.name in front else row.name,
                _text(row.parameters, _count),
                _text(row.bytes, _C.format_size),
                "-" if row.peak_bytes is None else span(*row.peak_bytes),
                _text(row.flops, _count),
            ]
            cells += [_text(row.seconds, seconds_text)] if self.time is not None else []
            cells += [_text(row.score, lambda score: f"{score:g}")] if scored else []
            rows.append(cells)
        return titles, rows

    def _notes(self) -> list[str]:
        methods = sorted({row.method for row in self.rows.values() if row.method})
        notes = (
            [f"* no other model has less {' and '.join(map(_word, self._axes()))}"] if self.pareto() else []
        )
        if methods:
            notes.append(f"peak: tensors on a card, estimated ({', '.join(methods)}), not measured")
        notes.append(
            "FLOPs: the whole step, by torch's counter; a multiplication and an addition count as two"
        )
        if self.time == MEASURED:
            notes.append(f"time: measured, alternating between the models, on {self.machine}")
        elif self.time == ESTIMATED:
            notes.append(
                f"time: estimated, a lower bound from the rates of a matrix product and a copy on {self.machine}"
            )
        return notes + [
            f"{row.name}: no figure for {what}: {why}" for row in self for what, why in row.errors.items()
        ]


def _known(key: str) -> None:
    if key not in KEYS:
        raise ValueError(f"{key!r} is not one of {', '.join(map(repr, KEYS))}")


def _beats(other: Sequence[Any], mine: Sequence[Any]) -> bool:
    return all(a <= b for a, b in zip(other, mine, strict=True)) and list(other) != list(mine)


def _word(key: str) -> str:
    return "(a higher) score" if key == "score" else key


def _text(value: Any, shown: Any) -> str:
    return "-" if value is None else str(shown(value))


def _count(number: int) -> str:
    for unit, power in (("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return str(number)
