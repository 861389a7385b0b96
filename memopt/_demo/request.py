"""The request to a process of the demo. Imports no torch: the simulated device has to be there before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One training. task: the fields of a Task. memory_budget: bytes; None: the ordinary training. recording: the file
    for its last steps' recording. threads: of torch's on a CPU."""

    task: dict[str, Any]
    steps: int
    memory_budget: int | None
    recording: str
    threads: int
