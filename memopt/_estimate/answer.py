"""Answer of an estimate's child process: where the script ended, and the memory it needed.

The processes of a script share its cards. Each that uses a card keeps a file beside the answer, of its memory there
over time, as it runs, so that a process that is killed counts too.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from memopt import _C
from memopt._estimate.step_time import Segment

# The fields that an Estimate has too.
_TOLD = (
    "by_category by_line by_module guesses unmodelled steps covered error versions simulated seconds"
    " processes step"
).split()


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
    processes: dict[str, Any] | None = None  # of the script's that share the card: together()'s
    step: list[Segment] | None = None  # one whole step, of those that were timed
    more: dict[str, Any] = field(default_factory=dict)  # what a later child tells besides

    @classmethod
    def from_json(cls, told: Any) -> Answer:
        names = {f.name for f in fields(cls)} - {"more"}
        if not isinstance(told, dict) or not {"peak_allocated", "peak_reserved"} <= set(told):
            raise ValueError("the child process's answer lacks peak_allocated and peak_reserved")
        known = {name: value for name, value in told.items() if name in names and value is not None}
        if "step" in known:
            known["step"] = _segments(known["step"])
        return cls(**known, more={name: value for name, value in told.items() if name not in names})

    def told(self) -> dict[str, Any]:
        """Return what an Estimate tells as the run did, by name."""
        return {name: getattr(self, name) for name in _TOLD} | {"host_peak_bytes": self.host_peak}

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
        """The number of CUDA contexts on the card, one for each process."""
        return max(1, len(self.processes["held"])) if self.processes else 1

    @property
    def shape_guesses(self) -> list[dict[str, Any]]:
        """The guesses of how many elements a mask selects: memory depends on them."""
        return [guess for guess in self.guesses if guess.get("kind") == "shape"]


# ---- the processes of a script ---------------------------------------------------------------------------------------


_FILES = "process-*.json"


def file_of_this_process(answer: str) -> str:
    return str(Path(answer).with_name(_FILES.replace("*", f"{os.getpid()}-{time.monotonic_ns()}")))


def seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_since_boot() -> float:
    """Return this process's start time in seconds since boot.

    Processes that start together count as running together, even if the first has ended by now.
    """
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


class _Use(NamedTuple):
    """One process's use of one card over a span of time."""

    since: float
    until: float
    allocated: int
    held: int
    of: dict[str, Any]


def together(answer: Answer, main: dict[str, Any], folder: Path, context: int, memory: int) -> Answer:
    """Add the processes that the script has started to its answer.

    The answer is then about the fullest card; the peaks of processes that use it at the same time are added.
    """
    started = [json.loads(path.read_text()) for path in sorted(folder.glob(_FILES))]
    if not started:
        return answer
    everyone = [main, *started]
    device, uses = _fullest(everyone, context)
    answer.peak_allocated = sum(use.allocated for use in uses)
    answer.peak_reserved = sum(use.held for use in uses)
    answer.device_peak = 0  # it is in what each holds
    answer.processes = {
        "device": device,
        "allocated": [use.allocated for use in uses],
        "held": [use.held for use in uses],
    }
    most = max(uses, key=lambda use: use.allocated, default=None)
    if most is not None and most.of is not main:
        answer.by_category, answer.by_line, answer.by_module = (
            most.of.get(name) or empty() for name, empty in _ATTRIBUTION
        )
        answer.more["recorded_peak"] = most.of.get("recorded_peak")
    answer.oom = answer.oom or next((one["oom"] for one in started if one.get("oom")), None)
    if answer.oom is None and answer.peak_reserved + len(uses) * context > memory:
        answer.oom = {"file": None, "line": None, "together": len(uses), "device": device}
    answer.retries = max(one.get("retries") or 0 for one in everyone)
    answer.steps = max(one.get("steps") or 0 for one in everyone)
    answer.guesses = _counted(everyone)
    answer.step = answer.step or next((_segments(one["step"]) for one in started if one.get("step")), None)
    answer.unmodelled = list(dict.fromkeys(name for one in everyone for name in one.get("unmodelled") or ()))
    answer.covered = _covered(answer, main, started)
    answer.more |= {
        "unseen": any(map(_failed, started)),
        "trained": any(one.get("trained") for one in everyone),
        "shortened": sorted({how for one in everyone for how in one.get("shortened") or ()}),
        "cudnn": any(one.get("cudnn") for one in everyone),
        "hangs_on_fraction": any(one.get("hangs_on_fraction") for one in everyone),
        "loaders_of_batch_size": _added(one.get("loaders_of_batch_size") for one in everyone),
    }
    return answer


def _segments(told: list[dict[str, Any]]) -> list[Segment]:
    return [Segment(**one) for one in told]


_ATTRIBUTION: tuple[tuple[str, Any], ...] = (("by_category", dict), ("by_line", list), ("by_module", list))


def _fullest(everyone: list[dict[str, Any]], context: int) -> tuple[int, list[_Use]]:
    """The card of which most is taken at once, and who uses it then."""
    found: tuple[int, list[_Use]] = 0, []
    most = -1
    for device in sorted({int(name) for one in everyone for name in one["devices"]}):
        name = str(device)
        uses = [_use(one, one["devices"][name], context) for one in everyone if name in one["devices"]]
        for one in uses:
            at_once = [use for use in uses if use.since <= one.since < use.until]
            taken = sum(use.held + context for use in at_once)
            if taken > most:
                most, found = taken, (device, at_once)
    return found


def _use(of: dict[str, Any], figures: list[int], context: int) -> _Use:
    allocated, reserved, used = figures
    return _Use(of["since"], of["until"], allocated, max(reserved, used - context), of)


def _counted(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in everyone:
        for guess in one.get("guesses") or ():
            counts[guess["kind"], guess["what"], guess["where"]] += guess["count"]
    return [
        {"kind": kind, "what": what, "where": where, "count": n} for (kind, what, where), n in counts.items()
    ]


def _covered(answer: Answer, main: dict[str, Any], started: list[dict[str, Any]]) -> list[str]:
    """Return the processes' lines, equal ones once; without the script's own if it has only started processes."""
    own = (
        answer.covered
        if main.get("trained") or main["stopped"] not in ("end", "exit")
        else answer.covered[1:]
    )
    lines: Counter[str] = Counter()
    for one in started:
        lines.update(_coverage_of(one))
    return [*own, *(f"in {_processes(count)} that it started: {line}" for line, count in lines.items())]


def _coverage_of(one: dict[str, Any]) -> list[str]:
    if _failed(one):
        return [f"it failed: {one['error']}"]
    return one.get("covered") or ["it was ended before its end"]


def _failed(one: dict[str, Any]) -> bool:
    return one.get("stopped") == "error" and not one.get("oom")


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _added(numbers: Any) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def processes_in_words(processes: dict[str, Any]) -> str:
    """A line that says which processes the figures are of, and how those of several came about."""
    sizes, device = processes["allocated"], processes["device"]
    if len(sizes) < 2:
        return f"the peak is that of a process that the script started, on cuda:{device}"
    each = " + ".join(map(_C.format_size, sizes))
    return (
        f"{len(sizes)} processes on cuda:{device}: {each} allocated; their peaks are added as if they occurred at the "
        "same time, so the sum is an upper bound; each process has its own context; lines and modules are those of "
        "the largest process"
    )
