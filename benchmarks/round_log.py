"""Finished rounds on disk, so that a soak run that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

try:
    from benchmarks import environment
    from benchmarks.comparison import Round
except ModuleNotFoundError:  # started as a script: this folder is on the path, its parent is not
    import environment
    from comparison import Round


class RoundLog:
    """A header line that says what is compared and where, then a line of JSON for each round, each synced to
    disk.

    A torn last line (the machine went down while it was written) is dropped; anything else unexpected is
    refused.
    """

    def __init__(self, path: Path, case: str, names: list[str], peer: str, clock: str) -> None:
        here = environment.describe()
        self.path = path
        self.key = {
            "case": case,
            "contenders": names,
            "peer": peer,
            "clock": clock,
            **{name: here[name] for name in ("commit", "cpu", "cores", "python", "torch", "simulated")},
        }
        self.calls: dict[str, int] = {}
        self.load_before = 0.0
        self.rounds: list[Round] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text()
        whole, _, torn = text.rpartition("\n")
        if torn:
            self.path.write_text(whole + "\n" if whole else "")
        if not whole:
            return
        header, *rounds = (json.loads(line) for line in whole.splitlines())
        if header["key"] != self.key:
            differs = [name for name in self.key if header["key"].get(name) != self.key[name]]
            raise ValueError(
                f"{self.path.name} holds rounds of another run (other {', '.join(differs)}); "
                "delete it to begin anew"
            )
        self.calls, self.load_before = header["calls"], header["load_before"]
        self.rounds = [Round(**turn) for turn in rounds]

    def start(self, calls: dict[str, int], load_before: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"key": self.key, "calls": calls, "load_before": load_before})

    def append(self, turn: Round) -> None:
        self._write(asdict(turn))

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
