"""Result of an estimate: figures, text for a terminal, a table for a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memopt import _C
from memopt._estimate import cards
from memopt._estimate.answer import processes_in_words
from memopt._estimate.cards import Card
from memopt._estimate.step_time import Segment
from memopt._memory.recording.category_split import in_words
from memopt._run.plan import KEEPS
from memopt._runtime.results import Result
from memopt._runtime.table import Code, Facts, ResultTable, counted, room_of_a_fact, several

SIMULATED = "simulated device"
FAKE = "fake tensors"


@dataclass
class Backend(Result):
    """The need of one allocator for the same run.

    completes: on the requested card.
    """

    name: str
    reserved_bytes: int
    completes: bool | None = None
    allocated_bytes: int = 0


@dataclass
class Advice(Result):
    """A change with which a run has fitted.

    Attributes:
        what: The change.
        peak_bytes: Most bytes of tensors that lived at once in that run.
        changes: Effect on the results, "" for none.
    """

    what: str
    peak_bytes: int
    changes: str = ""


@dataclass(repr=False)
class Estimate(Result):
    """A prediction of a training's memory. Print it; in a notebook it is a table.

    Figures that depend on unknown values are ranges: (low, high) in bytes, equal where the figure is certain.

    Attributes:
        title: The script or model.
        method: "simulated device" or "fake tensors".
        allocated_bytes: Bytes of live tensors in torch's allocator at the peak, without a limit.
        reserved_bytes: Bytes that torch's allocator holds at the peak, without a limit.
        context_bytes: Bytes that the process takes besides, for CUDA's context and kernels.
        card: The card that was asked for.
        verdict: "fits", "does not fit", "unsure" if it depends on unknown values, "" without a card.
    """

    # Told otherwise, or a part of the search for techniques.
    _not_plain = (
        "advice",
        "again",
        "held_bytes",
        "largest",
        "step",
        "moments",
        "before_training",
        "trained_bytes",
        "host_bytes",
        "keeps",
    )

    title: str
    method: str
    allocated_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]
    context_bytes: int
    card: Card | None = None
    verdict: str = ""
    oom: dict[str, Any] | None = None
    retries: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    by_line: list[dict[str, Any]] = field(default_factory=list)
    by_module: list[dict[str, Any]] = field(default_factory=list)
    unknowns: list[str] = field(default_factory=list)
    guesses: list[dict[str, Any]] = field(default_factory=list)
    unmodelled: list[Any] = field(default_factory=list)
    backends: list[Backend] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    ranks: dict[str, Any] | None = None
    processes: dict[str, Any] | None = None  # that share the card: its number, what each allocates and holds
    largest_batch: dict[str, Any] | None = None
    smallest_card: dict[str, Any] | None = None
    steps: int = 0
    covered: list[str] = field(default_factory=list)  # how much of the script was seen
    error: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)
    recording: str | None = None
    runs: int = 0
    seconds: float = 0.0
    host_peak_bytes: int = 0
    step: list[Segment] | None = None  # one whole step of the run without a limit, where it was timed
    moments: list[list[int]] | None = None  # of that run: moments.of()
    before_training: dict[str, Any] | None = None  # what lives then at most, and the lines that hold most
    trained_bytes: int = 0  # of the parameters of the optimizer that steps first
    held_bytes: int = (
        0  # by the allocator at the peak, with the unknown values that techniques are tried with
    )
    host_bytes: int = 0  # of the host's memory that is pinned
    keeps: list[str] = field(default_factory=lambda: [*KEEPS])  # as a plan has it
    again: Callable[[Card], bool] | None = None  # runs it on a card
    largest: Callable[[Card], int] | None = None  # searches the largest batch on a card

    @property
    def peak_bytes(self) -> tuple[int, int]:
        """Most bytes of tensors that live at once, as (low, high)."""
        return self.allocated_bytes

    @property
    def contexts(self) -> int:
        """Number of CUDA contexts in `context_bytes`, one for each process."""
        return max(1, len(self.processes["held"])) if self.processes else 1

    @property
    def needed_bytes(self) -> tuple[int, int]:
        """Bytes that the card must have for everything, the allocator's memory and the context, as (low, high)."""
        return self.reserved_bytes[0] + self.context_bytes, self.reserved_bytes[1] + self.context_bytes

    @property
    def too_large_before_training(self) -> dict[str, Any] | None:
        """`before_training`, where it is more than the card has: then no change of the training makes it fit."""
        if self.card is None or self.before_training is None:
            return None
        room = self.card.usable_bytes - self.context_bytes
        return self.before_training if self.before_training["bytes"] > room else None

    @property
    def is_tight(self) -> bool:
        """Return whether it fits its card only because the allocator gives back what it caches."""
        return (
            self.verdict == "fits" and self.card is not None and self.needed_bytes[1] > self.card.usable_bytes
        )

    def fits(self, card: str | int | Card) -> bool:
        """Return whether the run is sure to fit on a card.

        Where the figures leave it open, the script runs again on a simulated card of that size, because an allocator
        that reaches a limit gives back its cached memory.

        Args:
            card: "24GiB", "a100-40", bytes or a Card.
        """
        there = card if isinstance(card, Card) else cards.card(card)
        contexts = there.context_bytes * self.contexts
        if self.needed_bytes[1] - self.context_bytes + contexts <= there.usable_bytes:
            return True
        if self.allocated_bytes[0] + contexts > there.usable_bytes or self.again is None:
            return False
        return self.again(there)

    def max_batch_size(self, card: str | int | Card) -> int:
        """Return the largest batch size that is sure to fit on a card, 0 if not even 1 is.

        That batch size and the next are run.

        Args:
            card: "24GiB", "a100-40", bytes or a Card.

        Raises:
            ValueError: The batch dimension is not known, because there is no sample.
        """
        if self.largest is None:
            raise ValueError(
                "the batch dimension is not known: pass sample=, whose first dimension is the batch dimension"
            )
        return self.largest(card if isinstance(card, Card) else cards.card(card))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-able values; ranges are [low, high]."""
        return super().as_dict() | {
            "measured": False,
            "verdict": self.verdict or None,
            "needed_bytes": list(self.needed_bytes),
            "before_training": self.too_large_before_training,
            "would_fit": [one.as_dict() for one in self.advice],
            "sources": self.sources(),
        }

    def sources(self) -> dict[str, str]:
        """The source of each figure, by name: simulated, computed or from a table."""
        if self.method == FAKE:
            allocated = "storages of fake tensors, each rounded up to 512 bytes"
            reserved = "computed from the allocated bytes: no allocator has run"
        else:
            allocated = "torch's allocator, on a simulated device that computes nothing"
            reserved = allocated
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "context_bytes": "a table of cards, or as given: not simulated",
            "card": "a table of cards, from what CUDA reports" if self.card else "no card was given",
            "by_category": "a walk over modules and optimizers at the peak; the rest is activations and other",
            "would_fit": "one run for each, with the change applied; peak_bytes is the peak of that run",
        }

    def __str__(self) -> str:
        return str(Facts(_headline(self), _rows(self)))

    def _repr_html_(self) -> str:
        return Facts(_headline(self), _rows(self)).html()


# ---- the table -------------------------------------------------------------------------------------------------------

_ROWS = 5  # of lines and modules
_SHOWN = {"native": "native", "expandable": "expandable_segments", "pool": "memopt's pool"}
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0))


def span(low: int, high: int) -> str:
    """Return "1.50 GiB", or "1.50 - 1.75 GiB" for a range."""
    first, last = _C.format_size(low), _C.format_size(high)
    if first == last:
        return last
    return f"{first.split()[0]} - {last}" if first.split()[1] == last.split()[1] else f"{first} - {last}"


def _headline(found: Estimate) -> str:
    low, high = found.needed_bytes
    if found.card is None:
        return f"{found.title}: {span(low, high)} of a card, all counted"
    verdict = found.verdict if found.verdict == "fits" else found.verdict.upper()
    if found.is_tight:
        low, high, verdict = (
            found.allocated_bytes[0] + found.context_bytes,
            found.allocated_bytes[1] + found.context_bytes,
            "fits tightly",
        )
    usable = _C.format_size(found.card.usable_bytes)
    return f"{found.title} on {found.card.name}: {span(low, high)} of {usable} usable: {verdict}"


def _ranks(ranks: dict[str, Any]) -> str:
    """Describe the ranks, of which this estimate is the one with the highest peak."""
    peaks: dict[int, int] = ranks["peaks"]
    how = {"ddp": ", replicated", "fsdp": ", sharded by fully_shard", "tp": ", layers split"}
    this = f"this is rank {ranks['rank']} of {ranks['count']}{how.get(ranks['spread'] or '', '')}"
    if len(peaks) < 2:
        return this
    each = ", ".join(f"{rank}: {_C.format_size(peak)}" for rank, peak in peaks.items())
    return f"{this}; allocated at the peaks: {each}"


def _rows(found: Estimate) -> list[tuple[str, str]]:
    """Return a name and a text for each row."""
    said: list[tuple[str, str]] = []
    if found.oom:
        said.append(("ends", _ends(found.oom)))
    elif found.retries:
        said.append(
            (
                "tight",
                f"the allocator had to free its cache {found.retries} times: slow, and nearly out of memory",
            )
        )
    said.append(
        (
            "peak",
            f"{span(*found.allocated_bytes)} allocated, {span(*found.reserved_bytes)} reserved"
            f"{' where there is room' if found.is_tight else ''}, "
            f"{_C.format_size(found.context_bytes)} context",
        )
    )
    if found.ranks:
        said.append(("ranks", _ranks(found.ranks)))
    if found.by_category:
        said.append(("", f"= {in_one_unit(found.by_category)}"))
    named = [row for row in found.by_module if row.get("name")]
    said += attributed("lines", found.by_line) + attributed("modules", named)
    if found.processes:
        said.append(("processes", processes_in_words(found.processes)))
    said += several("covered", found.covered)
    if found.backends:
        said.append(("allocators", " | ".join(map(_backend_row, found.backends))))
    if found.largest_batch:
        said.append(("batch", _batch_row(found.largest_batch)))
    if found.smallest_card:
        said.append(("smallest", _smallest(found.smallest_card)))
    said += several("would fit", map(_advice_row, found.advice))
    if (early := found.too_large_before_training) is not None:
        said.append(("no change", f"is enough: {early_in_words(early)}"))
        said += attributed("", early["lines"])
    said += several("range", found.unknowns)
    said += several("guesses", map(_guess, found.guesses))
    said += several("not in it", map(str, found.unmodelled))
    if found.error:
        said.append(("error", found.error))
    said.append(("source", _source(found)))
    return said


def attributed(name: str, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return facts about the first rows of an answer's lines or modules."""
    table = ResultTable([*map(_attribution_row, rows[:_ROWS])], left=(1, 2))
    return several(name, map(Code, table.lines("  ", width=room_of_a_fact(), whole=2)))


def in_one_unit(by_category: dict[str, int]) -> str:
    """Return "12.1 activations + 4.6 optimizer + 2.3 parameters GiB": one unit, so that they can be added up."""
    shift, unit = next(((s, u) for u, s in _UNITS if sum(by_category.values()) >> s), (0, "bytes"))
    shown = [
        (size / (1 << shift), name) for name, size in sorted(by_category.items(), key=lambda i: -i[1]) if size
    ]
    digits = 2 if shift else 0
    seen = [f"{size:.{digits}f} {name}" for size, name in shown if size >= 0.005]
    return f"{' + '.join(seen)} {unit}"


def _ends(oom: dict[str, Any]) -> str:
    if oom.get("together"):
        return f"together, the peaks of {oom['together']} processes on cuda:{oom['device']} exceed the card"
    where = f"{_near(oom['file'])}:{oom.get('line', '?')}" if oom.get("file") else "a line outside the script"
    line = f" ({oom['text']})" if oom.get("text") else ""
    asked = f", requested {_C.format_size(oom['asked'])}" if oom.get("asked") else ""
    had = f" with {_C.format_size(oom['allocated'])} allocated" if oom.get("allocated") else ""
    when = ", after training, without gradients (an evaluation, or sampling)" if oom.get("evaluates") else ""
    return f"CUDA out of memory at {where}{line}{when}{asked}{had}"


def _near(path: str) -> str:
    """Return the path relative to the working directory if that is shorter."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or len(relative) > len(path) else relative


def _attribution_row(row: dict[str, Any]) -> tuple[str, str, str]:
    source = f"  {row['text'].strip()}" if row.get("text") else ""
    name = row.get("name") or "(no line of your script)"
    purpose = in_words(row["by_category"]) if row.get("by_category") else row.get("category", "")
    return _C.format_size(row["bytes"]), name, f"{purpose}{source}"


def _backend_row(backend: Backend) -> str:
    verdict = {True: ", fits", False: ", does not fit", None: ""}[backend.completes]
    return f"{_SHOWN[backend.name]} {_C.format_size(backend.reserved_bytes)}{verdict}"


def _batch_row(found: dict[str, Any]) -> str:
    size, card, option = found["size"], found["card"], found["option"]
    if not size:
        return f"not even 1 fits on {card} ({option})"
    if not found["bounded"]:
        return (
            f"{size} fits on {card}; a larger batch takes no more memory, as the dataset has no more "
            f"samples ({option})"
        )
    if not found["exact"]:
        return f"{size} fits on {card}; --max-batch searches for the largest ({option})"
    return f"the largest on {card} is {size}; {size + 1} runs out of memory ({option})"


def _smallest(found: dict[str, Any]) -> str:
    card = f", as {found['card']}" if found["card"] else ": larger than any card in the table"
    within = _C.format_size(found["within"])
    return f"{_C.format_size(found['bytes'])} of usable memory suffices (to within {within}){card}"


def early_in_words(early: dict[str, Any]) -> str:
    """Return why no plan fits, and what to do."""
    return (
        f"{_C.format_size(early['bytes'])} live before a module runs or an optimizer is made, which no plan changes: "
        "make the model on the CPU or in the dtype that it trains in, and keep data in the host's memory"
    )


def _advice_row(one: Advice) -> str:
    changes = f"; {one.changes}" if one.changes else ""
    return f"{one.what}: peak {_C.format_size(one.peak_bytes)}{changes}"


def _guess(one: dict[str, Any]) -> str:
    where = f" at {_near(one['where'])}" if one.get("where") else ""
    return f"{one.get('what', '?')}{where}, {one.get('count', 1)} times"


def _source(found: Estimate) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items() if value)
    steps = f"{counted(found.steps, 'step')} of the optimizer"
    if found.method == FAKE:
        return (
            "fake tensors, not measured; the less accurate method: neither an allocator nor CUDA code "
            f"has run; {steps}; {versions}"
        )
    capability = found.simulated.get("compute_capability") or (
        found.card.compute_capability if found.card else "8.0"
    )
    return f"simulated, not measured: compute capability {capability}; {steps}; {versions}"
