"""A log on disk of what is finished, so that a soak run that was interrupted continues."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

try:
    from benchmarks import environment
    from benchmarks.comparison import Round
except ModuleNotFoundError:  # started as a script: this folder is on the path, its parent is not
    import environment
    from comparison import Round


class LineLog:
    """A header line that says what is done and where, then a line of JSON for each piece that is finished, each
    synced to disk.

    A torn last line (the machine went down while it was written) is dropped; a log of another run, which `key` tells
    apart, another commit or another machine is refused.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        here = environment.describe()
        self.path = path
        self.key = {
            **key,
            **{name: here[name] for name in ("commit", "cpu", "cores", "python", "torch", "simulated")},
        }
        self.header: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text()
        whole, _, torn = text.rpartition("\n")
        if torn:
            self.path.write_text(whole + "\n" if whole else "")
        if not whole:
            return
        header, *lines = (json.loads(line) for line in whole.splitlines())
        if header["key"] != self.key:
            differs = [name for name in self.key if header["key"].get(name) != self.key[name]]
            raise ValueError(
                f"{self.path.name} holds rounds of another run (other {', '.join(differs)}); "
                "delete it to begin anew"
            )
        self.header, self.lines = header, lines

    def begin(self, **header: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"key": self.key, **header})

    def add(self, line: dict[str, Any]) -> None:
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class RoundLog(LineLog):
    """The finished rounds of a comparison."""

    def __init__(self, path: Path, case: str, names: list[str], peer: str, clock: str) -> None:
        super().__init__(path, {"case": case, "contenders": names, "peer": peer, "clock": clock})
        self.calls: dict[str, int] = self.header.get("calls", {})
        self.load_before: float = self.header.get("load_before", 0.0)
        self.rounds = [Round(**turn) for turn in self.lines]

    def start(self, calls: dict[str, int], load_before: float) -> None:
        self.begin(calls=calls, load_before=load_before)

    def append(self, turn: Round) -> None:
        self.add(asdict(turn))
