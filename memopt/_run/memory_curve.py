"""The host memory of a process and all below it, sampled from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from memopt._runtime.host_memory import descendants, resident_bytes

_BARS = "▁▂▃▄▅▆▇█"
_MOST = 512  # samples; then every second one goes, and they are taken half as often


@dataclass(frozen=True)
class Sample:
    """Resident bytes by process; pages that processes share count in each."""

    time: float
    resident: dict[int, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values())


@dataclass
class MemoryCurve:
    pid: int
    interval: float = 0.1  # seconds
    samples: list[Sample] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    peak: int = 0

    def sample(self) -> None:
        """If the last one is long enough ago. Nothing, once the process is gone."""
        now = time.monotonic()
        if self.samples and now - self.samples[-1].time < self.interval:
            return
        resident = {pid: size for pid in (self.pid, *descendants(self.pid)) if (size := _resident(pid))}
        if self.pid not in resident:
            return
        for pid in resident:
            self.names[pid] = self.names.get(pid) or _name(pid)  # a process has none before it has begun
        self.samples.append(Sample(now, resident))
        self.peak = max(self.peak, self.samples[-1].total)
        if len(self.samples) > _MOST:
            del self.samples[::2]
            self.interval *= 2

    def bars(self, width: int = 32) -> str:
        """The curve, a character for each stretch of time: the most there."""
        totals = [sample.total for sample in self.samples]
        if not totals:
            return ""
        step = max(1, -(-len(totals) // width))
        most = [max(totals[n : n + step]) for n in range(0, len(totals), step)]
        return "".join(_BARS[min(7, 8 * total // (max(most) + 1))] for total in most)

    def growth(self) -> list[tuple[int, str, int, float]]:
        """Processes that grew over the last part of the curve: pid, name, bytes, bytes a second; the fastest first."""
        if len(self.samples) < 2:
            return []
        last = self.samples[-1]
        first = next(
            s for s in self.samples if s.time >= last.time - max(1.0, (last.time - self.samples[0].time) / 4)
        )
        first = first if first is not last else self.samples[-2]
        seconds = last.time - first.time
        grown = [
            (
                pid,
                self.names[pid],
                size - first.resident.get(pid, 0),
                (size - first.resident.get(pid, 0)) / seconds,
            )
            for pid, size in last.resident.items()
        ]
        return sorted((one for one in grown if one[2] > 0), key=lambda one: -one[2])


def _resident(pid: int) -> int:
    try:
        return resident_bytes(pid)
    except OSError:  # it has just ended
        return 0


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return Path(words[0].decode(errors="replace")).name
    except OSError:
        return "?"
