"""The watch for memory that grows from step to step, and for the holder of the growth.

After each optimizer step one number is read: of each CUDA device the allocated bytes, of the CPU the process's own
memory. Its minimum over a window of steps rises from window to window only where something stays. Then, and only then,
a heap snapshot is taken, and another one a window later. The warning names the holder that has more tensors, or a
longer graph, and the next largest one. A false alarm doubles the window. Snapshots may take a hundredth of the time
that passes, no more.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt import _C
from memopt._memory.live import heap_snapshot
from memopt._memory.live.live_tensors import LiveGroup, LiveTensors, described
from memopt._runtime.host_memory import own_bytes
from memopt._runtime.log import logger, stacklevel

WINDOW = 16  # steps
RISES = 3  # windows, each with more than the one before
_SHARE = 0.01  # of the time
_FIRST = 0.2  # seconds that a heap snapshot is taken to need, as long as none was
_LONGEST = 3.0  # seconds for names, and as many for graphs: what live_tensors() may take, too
_NAMED = 3  # culprits of one warning, at most
_SMALL = 0.1  # of the largest: what grows by less waits until that is mended
_NOISE = 1 << 16  # bytes of a process that a window may have more than the last, and mean nothing


class GrowthWarning(UserWarning):
    """Warning: memory grows from step to step."""


@dataclass(frozen=True)
class Growth:
    """Growth of a group of tensors for each step; `group` is its state now."""

    nbytes: float
    tensors: float
    nodes: float
    group: LiveGroup

    def __str__(self) -> str:
        group = self.group
        size = _C.format_size(round(max(0.0, self.nbytes)))
        at = f" from {group.where}" if group.where else ""
        made = f" (made at {group.created})" if group.created else ""
        if not group.name:
            return (
                f"+{size}/step{made}: {group.count} tensors that no variable reaches: in reference cycles, which "
                "gc.collect() frees, or held by a library"
            )
        if group.nodes and self.nodes > 0:
            holds = f"a graph of {group.nodes} nodes; use .item() or .detach()"
        elif group.nodes:
            holds = f"{group.count} tensors with graphs; use .item() or .detach()"
        else:
            holds = f"{group.count} tensors; del those that are not needed"
        return f"+{size}/step{at}{made}, {group.name} holds {holds}"


def compare(before: LiveTensors, after: LiveTensors, steps: int) -> list[Growth]:
    """Return the groups whose number of tensors or graph length grew by at least one in two steps, largest first.

    Groups of a model and of an optimizer are left out: their sizes are fixed.
    """
    known = _by_key(before)
    found = []
    for key, group in _by_key(after).items():
        old = known.get(key)
        nbytes, count, nodes = (old.nbytes, old.count, old.nodes) if old else (0, 0, 0)
        growth = Growth(
            (group.nbytes - nbytes) / steps,
            (group.count - count) / steps,
            (group.nodes - nodes) / steps,
            group,
        )
        if max(growth.tensors, growth.nodes) >= 0.5 and growth.nbytes >= 0:
            found.append(growth)
    return sorted(found, key=lambda growth: (-growth.nbytes, -growth.nodes))


def _by_key(look: LiveTensors) -> dict[tuple[str, ...], LiveGroup]:
    """Return the groups that may grow, those of one key (inputs and activations of one name) as one."""
    found: dict[tuple[str, ...], LiveGroup] = {}
    for group in look.groups:
        if group.category in ("parameters", "gradients", "optimizer"):
            continue
        if other := found.get(key := _key(group)):
            group = replace(
                other,
                nbytes=other.nbytes + group.nbytes,
                count=other.count + group.count,
                nodes=max(other.nodes, group.nodes),
            )
        found[key] = group
    return found


def _culprits(grown: list[Growth], known: set[tuple[str, str]]) -> list[Growth]:
    """Return the groups that were not reported yet, each name once.

    A group without a name is left out beside one with a name: it may be what the named one leads to.
    """
    by_name: dict[tuple[str, str], Growth] = {}
    for growth in grown:
        if _name(growth) not in known:
            by_name.setdefault(_name(growth), growth)
    new = list(by_name.values())
    named = [growth for growth in new if growth.group.name]
    enough = [growth for growth in named if growth.nbytes >= _SMALL * named[0].nbytes]
    return enough[:_NAMED] or new[:1]


def _name(growth: Growth) -> tuple[str, str]:
    return growth.group.name, growth.group.where


def _key(group: LiveGroup) -> tuple[str, ...]:
    """A list of one element is written with its index, one of more is not."""
    return group.device, re.sub(r"\[\d+\]", "[*]", group.name), group.where, group.note


class GrowthWatch:
    """The watch; it begins with start() and ends with stop(). `window`, `share` and `clock` are for tests."""

    def __init__(
        self, window: int = WINDOW, share: float = _SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._window, self._share, self._clock = window, share, clock
        self._lock = threading.Lock()
        self._handle: Any = None
        self._leader: weakref.ref[Any] | None = None
        self._reading: _Reading | None = None
        self._began = self._spent = 0.0
        self._cost = _FIRST
        self._steps = 0
        self._levels: list[_Level] = []
        self._snapshot: tuple[int, LiveTensors] | None = None
        self._warned: set[tuple[str, str]] = set()

    def start(self) -> None:
        if self._handle is None:
            self._began = self._clock()
            self._reading = _Reading()
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._reading = None

    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Note a step of one optimizer; of several optimizers, one step of each is a step of the program."""
        if torch.compiler.is_compiling() or not self._lock.acquire(blocking=False):
            return
        try:
            leader = self._leader() if self._leader is not None else None
            if leader is None:
                self._leader = weakref.ref(optimizer)
            elif leader is not optimizer:
                return
            self._step()
        except Exception:  # the program's training is worth more than what is said of it
            logger.exception("memory growth is no longer watched")
            self.stop()
        finally:
            self._lock.release()

    def _step(self) -> None:
        assert self._reading is not None
        self._steps += 1
        if self._steps <= self._window:  # caches and states come into being
            return
        values = self._reading.values()
        if len(values) != len(self._levels):
            self._levels = [_Level(noise) for noise in self._reading.noise]
        end = self._steps % self._window == 0
        for level, value in zip(self._levels, values, strict=True):
            level.see(value, end)
        if self._snapshot is not None:
            if self._steps - self._snapshot[0] >= self._window and self._may_look():
                self._compare()
        elif end and any(level.rises >= RISES for level in self._levels) and self._may_look():
            self._snapshot = self._steps, self._look()

    def _may_look(self) -> bool:
        return self._spent + self._cost <= self._share * (self._clock() - self._began)

    def _look(self) -> LiveTensors:
        start = self._clock()
        left = self._share * (start - self._began) - self._spent
        each = min(_LONGEST, max(_FIRST, left) / 2)  # for names, for graphs
        taken = heap_snapshot.take(each, each)
        try:
            found = described(taken)
        finally:
            taken.forget()
        took = self._clock() - start
        self._spent += took
        self._cost = (
            took if found.complete else 2 * took
        )  # the next one is to have the time that this one lacked
        return found

    def _compare(self) -> None:
        assert self._snapshot is not None
        step, before = self._snapshot
        self._snapshot = None
        after = self._look()
        # What has no name because there was no time to find it is no growth.
        grown = compare(before, after, self._steps - step) if before.complete and after.complete else []
        new = _culprits(grown, self._warned)
        if new:
            self._warned.update(map(_name, new))
            warnings.warn("\n".join(map(str, new)), GrowthWarning, stacklevel=stacklevel())
        self._window *= 2
        self._levels.clear()


class _Level:
    """The least of a number in a window of steps, and for how many windows it has risen."""

    def __init__(self, noise: int) -> None:
        self._noise = noise
        self._least: int | None = None
        self._last: int | None = None
        self.rises = 0

    def see(self, value: int, end: bool) -> None:
        self._least = value if self._least is None else min(self._least, value)
        if end:
            risen = self._last is not None and self._least > self._last + self._noise
            self.rises = self.rises + 1 if risen else 0
            self._last, self._least = self._least, None


class _Reading:
    """Bytes allocated on each CUDA device; without one, bytes of the process's own pages."""

    def __init__(self) -> None:
        self.noise: list[int] = []

    def values(self) -> list[int]:
        if torch.cuda.is_initialized():
            devices = range(torch.cuda.device_count())
            self.noise = [0 for _ in devices]
            return [torch._C._cuda_memoryStats(i)["allocated_bytes"]["all"]["current"] for i in devices]
        self.noise = [_NOISE]
        return [own_bytes()]
