"""What the child is asked and what it answers: both are JSON files, so that any interpreter can be the child."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

BACKENDS = ("native", "expandable", "pool")


@dataclass(frozen=True)
class Request:
    """One run of a script on one simulated card."""

    argv: tuple[str, ...]  # the script, or with `module` the module's name, and its arguments
    memory: int
    compute_capability: str = "8.0"
    multiprocessors: int = 108
    context: int = 0
    cudnn_workspace: int = 0  # what each of cuDNN's plans asks for: NVIDIA's sizes are not known
    fraction: float = 1.0  # of a mask whose values are not known, what is taken to be selected
    steps: int | None = 3  # of the optimizer, after which the script is stopped; None: never
    backend: str = "native"
    batch_size: int | None = None  # for every DataLoader, in the place of its own
    record: bool = True
    keep_files: bool = False  # what the script writes: else it goes to a scratch folder
    seconds: float | None = None
    module: bool = False

    def as_json(self, answer: str, recording: str | None) -> dict[str, Any]:
        return {**asdict(self), "argv": list(self.argv), "answer": answer, "recording": recording}


@dataclass
class Answer:
    """What came of it. `oom`: where the script ended for want of memory, None where it did not. `stopped`: "end",
    "steps", "exit", "error" or "seconds"."""

    peak_allocated: int
    peak_reserved: int
    device_peak: int = 0
    retries: int = 0
    oom: dict[str, Any] | None = None
    by_category: dict[str, int] = field(default_factory=dict)
    by_line: list[dict[str, Any]] = field(default_factory=list)
    by_module: list[dict[str, Any]] = field(default_factory=list)
    guesses: list[dict[str, Any]] = field(default_factory=list)
    unmodelled: list[Any] = field(default_factory=list)
    steps: int = 0
    stopped: str = "end"
    exit_status: int = 0
    error: str | None = None
    seconds: float = 0.0
    host_peak: int = 0
    versions: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)  # what a later child tells besides

    @classmethod
    def from_json(cls, told: Any) -> Answer:
        names = {f.name for f in fields(cls)} - {"more"}
        if not isinstance(told, dict) or not {"peak_allocated", "peak_reserved"} <= set(told):
            raise ValueError("the child's answer has no peak_allocated and peak_reserved")
        known = {name: value for name, value in told.items() if name in names and value is not None}
        return cls(**known, more={name: value for name, value in told.items() if name not in names})

    @property
    def completed(self) -> bool:
        """It ran as far as it was meant to, within the card's memory."""
        return self.oom is None and not self.failed

    @property
    def failed(self) -> bool:
        """It ended for another reason than memory: what was seen until then says nothing of the rest."""
        return self.oom is None and (
            self.stopped == "error" or (self.stopped == "exit" and self.exit_status != 0)
        )

    @property
    def shape_guesses(self) -> list[dict[str, Any]]:
        """Those of how many elements a mask selects: memory depends on them."""
        return [guess for guess in self.guesses if guess.get("kind") == "shape"]
