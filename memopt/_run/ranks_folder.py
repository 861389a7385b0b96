"""Folder with the reports of the ranks of one job under `memopt run`: rank0.mopt and rank0.json, rank1.mopt …

torchrun starts each rank by itself, so nobody is there to gather; the rank that ends last finds all others' in the
folder, and tells of all. Ranks know each other by the environment that torchrun gives them. On several nodes the folder
has to be one that all of them see; a node that sees its own ranks alone tells of those."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LATE = 8.0  # seconds that a rank which was ended waits for others' ends before it tells of those it knows


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks."""

    rank: int
    count: int
    local_count: int
    job: str  # of the ranks that see this folder, in a file's name

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place | None:
        """Return the place, None for a process alone."""
        try:
            rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", count))
        except (KeyError, ValueError):
            return None
        if count < 2 or not 0 <= rank < count:
            return None
        if local == count and "TORCHELASTIC_RUN_ID" in environment:
            job = str(os.getppid())  # the agent's, which started all of them
        else:
            known = (
                environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
            )
            job = "-".join(filter(None, known)) or "ranks"
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restarts not in ("", "0"):
            job += f".restart{restarts}"
        return Place(rank, count, local, re.sub(r"[^\w.-]", "_", job))


class RanksFolder:
    """folder: as every rank names it. Files in it are whole or not there."""

    def __init__(self, folder: str | Path, place: Place) -> None:
        self.path, self.place = Path(folder).absolute(), place

    @property
    def recording(self) -> str:
        return str(self.path / f"rank{self.place.rank}.mopt")

    def begin(self) -> None:
        """Begin this rank's run, and remove what an earlier job has left of it."""
        self.path.mkdir(parents=True, exist_ok=True)
        Path(self.recording).unlink(missing_ok=True)
        (self.path / "told").unlink(missing_ok=True)
        self._write({"state": "running"})

    def end(self, outcome: dict[str, Any], *, wait: bool) -> bool:
        """Record the end of this rank; return whether it must report for all, as the last one.

        wait: it was ended from outside, as all are when one fails; if others do not end then, the first to have waited
        for a while reports."""
        with self._alone():
            self._write({"state": "ended", **outcome})
            if self._is_complete():
                return True
        if not wait:
            return False
        until = time.monotonic() + _LATE
        while time.monotonic() < until:
            time.sleep(0.1)
            if self._is_complete():
                return False  # another one was the last
        with self._alone():
            told = self.path / "told"
            if self._is_complete() or told.exists():
                return False
            told.touch()
            return True

    def _is_complete(self) -> bool:
        ranks = [one for one in load(self.path) if one["job"] == self.place.job]
        ended = [one for one in ranks if one["state"] == "ended"]
        if len(ended) == self.place.count:
            return True
        here = socket.gethostname()
        return len(ranks) == len(ended) == self.place.local_count and all(
            one["host"] == here for one in ranks
        )

    def _write(self, told: dict[str, Any]) -> None:
        head = {
            "rank": self.place.rank,
            "ranks": self.place.count,
            "job": self.place.job,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        path = self.path / f"rank{self.place.rank}.json"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(head | told))
        part.replace(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of all ranks."""
        with open(self.path / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_MOST_RANKS = 1 << 20
_ROW = {"name": (str,), "text": (str,), "bytes": (int,)}
_FIGURES = {
    "peak_bytes": (int,),
    "peak_step": (int,),
    "steps": (int,),
    "by_category": dict,
    "by_line": [_ROW],
    "by_module": [_ROW],
    "device?": (str,),
    "peak_reserved?": (int, type(None)),
    "oom?": (str, type(None)),
}
_RANK = {
    "rank": (int,),
    "ranks": (int,),
    "job": (str,),
    "host": (str,),
    "state": (str,),
    "pid": (int,),
    "program?": (str,),
    "status?": (int,),
    "ended?": (str,),
    "seconds?": (int, float),
    "host_peak?": (int, type(None)),
    "of_a_signal?": [(str,)],
    "failure?": (str,),
    "was_at?": [(str,)],
    "figures?": _FIGURES,
    "progress?": {"steps?": (int,)},
}
"""A rank's file: types, a list or dict of them; those with a question mark may be missing, dicts None then."""


def _check(value: Any, shape: Any, called: str) -> None:
    """Raise TypeError if a value does not have the shape; `called` is its name in the error."""
    if isinstance(shape, tuple):
        least = -64 if called == "status" else 0  # a signal's is below zero
        if type(value) not in shape or not (
            type(value) is str or value is None or least <= value < 1 << 63  # as NaN is not
        ):
            raise TypeError(f"{called} is not a {shape[0].__name__}")
    elif isinstance(shape, list):
        for number, one in enumerate(_of(value, list, called)):
            _check(one, shape[0], f"{called}[{number}]")
    elif shape is dict:
        for name, one in _of(value, dict, called).items():
            _check(one, (int,), f"{called}[{name!r:.100}]")
    else:
        _of(value, dict, called)
        for name, inner in shape.items():
            bare = name.removesuffix("?")
            missing = value.get(bare) is None if isinstance(inner, dict) else bare not in value
            if not (missing and bare != name):
                _check(value.get(bare), inner, bare)


def _of(value: Any, kind: type, called: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{called} is not a {kind.__name__}")
    return value


def load(folder: str | Path) -> list[dict[str, Any]]:
    """Return the reports of the last job's ranks, by rank.

    Raises ValueError, naming the file, for one that no rank has written."""
    found: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("rank*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
            _check(one, _RANK, "it")
            if not 0 <= one["rank"] < one["ranks"] <= _MOST_RANKS:
                raise ValueError(f"it claims to be rank {one['rank']} of {one['ranks']}")
            # A file may say half of a character, which no terminal takes.
            found.append(json.loads(json.dumps(one, ensure_ascii=False).encode(errors="replace")))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: it is not the report of a rank of `memopt run` ({error})") from None
    return sorted((one for one in found if one["job"] == found[-1]["job"]), key=lambda one: one["rank"])
