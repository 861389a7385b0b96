"""What a process of the demo is asked, a line of JSON, and what it tells, one a line. Imports no torch: the simulated
device has to be there before it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Asked:
        return Asked(**json.loads(text))


def tell(kind: str, **what: Any) -> None:
    """To the parent. Where there is none any more this process ends, too."""
    try:
        sys.stdout.write(json.dumps({"kind": kind, **what}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)
