"""The result of memopt.estimate() and of `python -m memopt estimate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from memopt._estimate import cards
from memopt._estimate.cards import Card

SIMULATED = "simulated device"
FAKE = "fake tensors"


@dataclass
class Backend:
    """The need of one allocator for the same run.

    completes: on the requested card.
    """

    name: str
    reserved: int
    completes: bool | None = None
    allocated: int = 0


@dataclass
class Advice:
    """A change with which a run has fitted.

    Attributes:
        what: The change.
        peak: Most bytes of tensors that lived at once in that run.
        changes: Effect on the results, "" for none.
    """

    what: str
    peak: int
    changes: str = ""


@dataclass
class Estimate:
    """A prediction of a training's memory. Print it; in a notebook it is a table.

    Figures that depend on unknown values are ranges: (low, high) in bytes, equal where the figure is certain.

    Attributes:
        title: The script or model.
        method: "simulated device" or "fake tensors".
        allocated: Bytes of live tensors in torch's allocator at the peak, without a limit.
        reserved: Bytes that torch's allocator holds at the peak, without a limit.
        context: Bytes that the process takes besides, for CUDA's context and kernels.
        card: The card that was asked for.
        verdict: "fits", "does not fit", "unsure" if it depends on unknown values, "" without a card.
    """

    title: str
    method: str
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    context: int
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
    host_peak: int = 0
    again: Callable[[Card], bool] | None = None  # runs it on a card
    largest: Callable[[Card], int] | None = None  # searches the largest batch on a card

    @property
    def peak(self) -> tuple[int, int]:
        """Most bytes of tensors that live at once, as (low, high)."""
        return self.allocated

    @property
    def contexts(self) -> int:
        """Number of CUDA contexts in `context`, one for each process."""
        return max(1, len(self.processes["held"])) if self.processes else 1

    @property
    def needed(self) -> tuple[int, int]:
        """Bytes that the card must have for everything, the allocator's memory and the context, as (low, high)."""
        return self.reserved[0] + self.context, self.reserved[1] + self.context

    def fits(self, card: str | int | Card) -> bool:
        """Return whether the run is sure to fit on a card.

        Where the figures leave it open, the script runs again on a simulated card of that size, because an allocator
        that reaches a limit gives back its cached memory.

        Args:
            card: "24GiB", "a100-40", bytes or a Card.
        """
        there = card if isinstance(card, Card) else cards.card(card)
        contexts = there.context * self.contexts
        if self.needed[1] - self.context + contexts <= there.usable:
            return True
        if self.allocated[0] + contexts > there.usable or self.again is None:
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
                "the batch dimension is not known: pass sample=, whose first dimension is the batch's"
            )
        return self.largest(card if isinstance(card, Card) else cards.card(card))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-able values.

        peak_allocated and peak_reserved are the low ends; their ranges are beside them.
        """
        return {
            "title": self.title,
            "method": self.method,
            "measured": False,
            "verdict": self.verdict or None,
            "card": asdict(self.card) if self.card else None,
            "peak_allocated": self.allocated[0],
            "peak_reserved": self.reserved[0],
            "peak_allocated_range": list(self.allocated),
            "peak_reserved_range": list(self.reserved),
            "context": self.context,
            "needed_range": list(self.needed),
            "oom": self.oom,
            "retries": self.retries,
            "by_category": self.by_category,
            "by_line": self.by_line,
            "by_module": self.by_module,
            "unknowns": self.unknowns,
            "guesses": self.guesses,
            "unmodelled": self.unmodelled,
            "backends": [asdict(backend) for backend in self.backends],
            "would_fit": [asdict(one) for one in self.advice],
            "ranks": self.ranks,
            "processes": self.processes,
            "largest_batch": self.largest_batch,
            "smallest_card": self.smallest_card,
            "steps": self.steps,
            "covered": self.covered,
            "error": self.error,
            "sources": self.sources(),
            "versions": self.versions,
            "simulated": self.simulated,
            "recording": self.recording,
            "runs": self.runs,
            "seconds": self.seconds,
            "host_peak": self.host_peak,
        }

    def sources(self) -> dict[str, str]:
        """The source of each figure, by name: simulated, computed or from a table."""
        if self.method == FAKE:
            allocated = "storages of fake tensors, each rounded up to 512 bytes"
            reserved = "worked out from the allocated bytes: no allocator has run"
        else:
            allocated = "torch's allocator, on a simulated device that computes nothing"
            reserved = allocated
        return {
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "context": "a table of cards, or as given: not simulated",
            "card": "a table of cards, from what CUDA tells of them" if self.card else "none was asked for",
            "by_category": "a walk over modules and optimizers at the peak; the rest is activations and other",
            "would_fit": "a run each, with the change applied; 'peak' is that run's",
        }

    def __str__(self) -> str:
        from memopt._estimate import screen

        return screen.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from memopt._estimate import screen

        return screen.html(self)
