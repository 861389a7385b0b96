"""What an estimate says: the answer of memopt.estimate() and of `python -m memopt estimate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from memopt.estimation import cards
from memopt.estimation.cards import Card

SIMULATED = "simulated device"
FAKE = "fake tensors"


@dataclass
class Backend:
    """What one allocator needs for the same run; `completes`: on the card that was asked for."""

    name: str
    reserved: int
    completes: bool | None = None
    allocated: int = 0


@dataclass
class Advice:
    """A change with which a run has fitted. `peak`: the most bytes of tensors that lived at once in it; `changes`: how
    the results differ, "" where they do not."""

    what: str
    peak: int
    changes: str = ""


@dataclass
class Estimate:
    """A prediction. Bytes that are not knowable are a range: (low, high), which are equal where they are.

    `allocated` and `reserved`: what torch's allocator hands out and holds at its peak, without a limit; `context`: what
    the process takes besides. `verdict`: "fits", "does not fit", "unsure" where it depends on what is not knowable, ""
    where no card was asked for. print() shows it; in a notebook it is a table."""

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
        """(low, high): the most bytes of tensors that live at once."""
        return self.allocated

    @property
    def needed(self) -> tuple[int, int]:
        """(low, high): of the card, all counted: what the allocator holds and the context."""
        return self.reserved[0] + self.context, self.reserved[1] + self.context

    def fits(self, card: str | int | Card) -> bool:
        """Whether it is sure to run on a card ("24GiB", "a100-40"): where the figures leave it open it is run there,
        for an allocator that meets a limit gives back what it only keeps."""
        there = card if isinstance(card, Card) else cards.card(card)
        if self.needed[1] - self.context + there.context <= there.usable:
            return True
        if self.allocated[0] + there.context > there.usable or self.again is None:
            return False
        return self.again(there)

    def max_batch_size(self, card: str | int | Card) -> int:
        """The largest batch that is sure to fit on a card, 0 where not even 1 does. It is run, and one more."""
        if self.largest is None:
            raise ValueError(
                "what is the batch is not known: pass sample=, whose first dimension is the batch's"
            )
        return self.largest(card if isinstance(card, Card) else cards.card(card))

    def as_dict(self) -> dict[str, Any]:
        """For JSON. peak_allocated and peak_reserved are the lower ends; their ranges are beside them."""
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
        """Where each figure comes from."""
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
        from memopt.estimation import screen

        return screen.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from memopt.estimation import screen

        return screen.html(self)
