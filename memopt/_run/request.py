"""Request of a run's parent to its child, and the files that the child leaves in a shared folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunRequest:
    """folder: the run's own, for summary.txt, failure.txt and progress.json. output: of the recording, None for the
    default name. simulated: settings of a simulated card on which it runs, None for what the machine has."""

    argv: list[str]
    module: bool
    folder: str
    output: str | None = None
    record: bool = True
    device: str | None = None
    max_events: int = 200_000
    backend: str | None = None
    memory_budget: int | None = None
    on_oom: str | None = None
    simulated: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RunRequest:
        return RunRequest(**json.loads(text))

    @property
    def name(self) -> str:
        """Of the program, for a file's name."""
        return self.argv[0].rpartition(".")[2] if self.module else Path(self.argv[0]).stem
