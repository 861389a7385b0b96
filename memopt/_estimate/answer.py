"""Answer of an estimate's child process: where the script ended, and the memory it needed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Answer:
    """Outcome of a run. `oom`: where the script ended for want of memory, None where it did not. `stopped`: "end",
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
    covered: list[str] = field(default_factory=list)  # how much of the script was seen
    versions: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Any] | None = None  # of the script's that share the card: processes.py's
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
    def held(self) -> int:
        """Bytes that the allocator held, or the device if that was more (memory taken past the allocator)."""
        return max(self.peak_reserved, self.device_peak - int(self.simulated.get("context") or 0))

    @property
    def contexts(self) -> int:
        """Of CUDA's, one a process, on the card."""
        return max(1, len(self.processes["held"])) if self.processes else 1

    @property
    def shape_guesses(self) -> list[dict[str, Any]]:
        """Those of how many elements a mask selects: memory depends on them."""
        return [guess for guess in self.guesses if guess.get("kind") == "shape"]
