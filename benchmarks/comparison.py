"""The outcome of rounds of interleaved timing: best, median and spread of each contender, and its ratio to the
peer.

    ratio = peer / contender        2.0: twice as fast as the peer, or half of its bytes

taken within a round, never between medians of different rounds.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import Any

try:
    from benchmarks import environment
except ModuleNotFoundError:  # started as a script: this folder is on the path, its parent is not
    import environment


@dataclass(frozen=True)
class Spread:
    """A sample's summary. `spread` is (largest - smallest) / median."""

    best: float
    median: float
    worst: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    @property
    def spread(self) -> float:
        return (self.worst - self.best) / self.median if self.median else math.inf


@dataclass
class Round:
    """One turn of every contender: seconds a call, in which order, and the 1-minute load average after it."""

    order: list[str]
    seconds: dict[str, float]
    load: float


@dataclass
class Comparison:
    """The rounds of one case, and what they say."""

    case: str
    peer: str
    clock: str
    calls: dict[str, int]
    rounds: list[Round] = field(default_factory=list)
    load_before: float = 0.0
    goal: float | dict[str, float] | None = None  # of all contenders, or of those named
    moved: dict[str, float] = field(default_factory=dict)  # bytes a call reads and writes, where that is said

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Comparison:
        """The comparison of which as_dict() is given."""
        found = cls(**{f.name: saved[f.name] for f in fields(cls)})
        found.rounds = [Round(**turn) for turn in saved["rounds"]]
        return found

    def seconds(self, name: str) -> Spread:
        return Spread.of([turn.seconds[name] for turn in self.rounds])

    def ratios(self, name: str) -> list[float]:
        """peer / contender, round by round."""
        return [turn.seconds[self.peer] / turn.seconds[name] for turn in self.rounds]

    def rates(self, name: str) -> list[float]:
        """Bytes a second, round by round."""
        return [self.moved[name] / turn.seconds[name] for turn in self.rounds]

    def shares(self, name: str, bound: str) -> list[float]:
        """Bytes a second over those of `bound`, round by round: 1.0 moves its bytes as fast."""
        return [ours / best for ours, best in zip(self.rates(name), self.rates(bound), strict=True)]

    def verdict(self, name: str) -> str:
        """Faster or slower, if every round says so, with a doubt about the size where the ratios spread wider
        than the effect; else "within the noise"."""
        ratios = self.ratios(name)
        effect, noise = abs(statistics.median(ratios) - 1), max(ratios) - min(ratios)
        if min(ratios) > 1 or max(ratios) < 1:
            sign = "faster" if min(ratios) > 1 else "slower"
            return (
                sign
                if noise <= effect
                else f"{sign}, size uncertain (spread {noise:.2f} > effect {effect:.2f})"
            )
        return f"within the noise (spread {noise:.2f}, effect {effect:.2f})"

    def goals(self) -> dict[str, float]:
        """The least median ratio that is asked of each contender of which one is asked."""
        if self.goal is None:
            return {}
        if isinstance(self.goal, dict):
            return self.goal
        return {name: self.goal for name in self.calls if name != self.peer}

    def goal_met(self) -> bool | None:
        """Return whether all that have a goal reach it by the median ratio; None without a goal."""
        if self.goal is None:
            return None
        return all(statistics.median(self.ratios(name)) >= goal for name, goal in self.goals().items())

    def as_dict(self) -> dict[str, object]:
        summary: dict[str, dict[str, object]] = {}
        for name in self.calls:
            times, ratios = self.seconds(name), Spread.of(self.ratios(name))
            summary[name] = {
                "seconds": {**asdict(times), "spread": times.spread},
                "ratio": {"median": ratios.median, "min": ratios.best, "max": ratios.worst},
                "verdict": None if name == self.peer else self.verdict(name),
            }
            if name in self.moved:
                summary[name]["bytes_per_second"] = statistics.median(self.rates(name))
        return {**asdict(self), "goal_met": self.goal_met(), "summary": summary}

    def __str__(self) -> str:
        width = max(map(len, self.calls)) + 2
        lines = [
            f"{self.case}   ({len(self.rounds)} rounds, {self.clock} clock, ratio = {self.peer} / contender)"
        ]
        rate = f"{'GB/s':>8}" if self.moved else ""
        lines.append(f"  {'':<{width}}{'best':>11}{'median':>11}{'spread':>8}{rate}   ratio (min … max)")
        for name in self.calls:
            times, ratios = self.seconds(name), Spread.of(self.ratios(name))
            row = (
                f"  {name:<{width}}{duration(times.best):>11}{duration(times.median):>11}{times.spread:>8.0%}"
            )
            if self.moved:
                known = name in self.moved
                row += f"{statistics.median(self.rates(name)) / 1e9:>8.1f}" if known else " " * 8
            if name != self.peer:
                row += (
                    f"   {ratios.median:.2f} ({ratios.best:.2f} … {ratios.worst:.2f})  {self.verdict(name)}"
                )
            lines.append(row)
        loads = [self.load_before, *(turn.load for turn in self.rounds)]
        lines.append(
            f"  load {min(loads):.2f} … {max(loads):.2f} on {environment.usable_cores()} cores" + self._busy()
        )
        if isinstance(self.goal, dict):
            for name, goal in self.goal.items():
                reached = statistics.median(self.ratios(name)) >= goal
                lines.append(f"  goal of {name} {goal:.2f}: {'reached' if reached else 'MISSED'}")
        elif self.goal is not None:
            lines.append(f"  goal {self.goal:.2f}: {'reached' if self.goal_met() else 'MISSED'}")
        return "\n".join(lines)

    def _busy(self) -> str:
        """A machine that already had work for every core before the first round times that work too."""
        return "; the machine was busy before" if self.load_before >= environment.usable_cores() else ""


@dataclass
class Figure:
    """Values that are not times (bytes, counts), side by side. Ratio = peer / contender again: 2.0 needs half
    as much."""

    case: str
    values: dict[str, float]
    unit: str
    peer: str
    goal: float | None = None

    def ratio(self, name: str) -> float:
        return self.values[self.peer] / self.values[name] if self.values[name] else math.inf

    def goal_met(self) -> bool | None:
        if self.goal is None:
            return None
        return all(self.ratio(name) >= self.goal for name in self.values if name != self.peer)

    def as_dict(self) -> dict[str, object]:
        # JSON has no infinity; a contender that needs nothing has no ratio.
        ratios = {name: self.ratio(name) if self.values[name] else None for name in self.values}
        return {**asdict(self), "goal_met": self.goal_met(), "ratio": ratios}

    def __str__(self) -> str:
        lines = [f"{self.case}   ({self.unit}, ratio = {self.peer} / contender)"]
        for name, value in self.values.items():
            ratio = "" if name == self.peer else f"   {self.ratio(name):.2f}"
            lines.append(f"  {name:<{max(map(len, self.values)) + 2}}{value:>14,.6g}{ratio}")
        if self.goal is not None:
            lines.append(f"  goal {self.goal:.2f}: {'reached' if self.goal_met() else 'MISSED'}")
        return "\n".join(lines)


def duration(seconds: float) -> str:
    """3 significant digits in s, ms, µs or ns."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
