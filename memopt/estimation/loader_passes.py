"""Passes over DataLoaders, which end as loops do (loops.py): one that trains after a few steps, one that evaluates
after a few batches and its last one.

What an evaluation keeps of each batch, such as predictions, is as much as there are batches: where memory grows with
each of them the pass is run whole; where that would take long, the batches that are left out are replaced by a block of
the size of what they would have left behind."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import dataloader

from memopt import _C
from memopt.estimation.loops import For, Loop, Loops
from memopt.profiling.user_code import is_user_file

_BATCHES = 4  # of an evaluation: the difference between two of them is seen twice
_WHOLE = 20.0  # seconds that an evaluation may take whose memory grows
_SKIPPED = 1 << 17  # batches whose indices are gone through for those of the last one
_FOR_ITER = dis.opmap["FOR_ITER"]


class _Memory(NamedTuple):
    """Of the current device: bytes and blocks that are allocated, and how many ever were."""

    bytes: int
    blocks: int
    ever: int


class _Pass:
    """One over a loader. `given`: batches so far; `seen`: the memory when each was asked for; `settled`: whether it
    trains or evaluates is known, and so is its end; `whole`: it is not to end before its last batch."""

    def __init__(self, loops: Loops, loop: Loop) -> None:
        self._loops, self.loop = loops, loop
        self.given = 0
        self.seen: list[_Memory] = []
        self.done = self.settled = self.whole = False
        self.backwards, self.taken = loops.backwards, loops.taken
        self.begun = self.asked = time.monotonic()
        self.left_behind: torch.Tensor | None = None

    def __del__(self) -> None:
        self._loops.leave(self.loop)


class LoaderPasses:
    """Ends passes from now on, for the life of the process; those that evaluate where `evaluations` says so. `kept`:
    what evaluations keep, a sentence each."""

    def __init__(self, loops: Loops, evaluations: bool = True) -> None:
        self._loops, self._evaluations = loops, evaluations
        self.kept: dict[str, str] = {}
        iterator: Any = dataloader._BaseDataLoaderIter
        self._next, self._reset = iterator.__next__, iterator._reset
        iterator.__next__ = lambda batches: self._give(batches)
        iterator._reset = lambda batches, *args, **kwargs: self._begin(batches, *args, **kwargs)

    def _begin(self, batches: Any, *args: Any, **kwargs: Any) -> None:
        batches.__dict__.pop("_memopt_pass", None)
        self._reset(batches, *args, **kwargs)

    def _give(self, batches: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return self._next(batches)
        place, may_end, fed = _asker(sys._getframe(2))
        found: _Pass | None = batches.__dict__.get("_memopt_pass")
        if found is None:
            loop = self._loops.enter(("loader", id(batches._dataset)), place)
            found = batches._memopt_pass = _Pass(self._loops, loop)
        if fed is not None:
            fed.fed, found.loop.periodic = True, fed.periodic
        if not may_end:  # by next(): a script that asks so may not expect an end
            self._loops.leave(found.loop)
        elif found.done or self._ends(batches, found):
            found.done, found.left_behind = True, None
            self._loops.leave(found.loop)
            raise StopIteration
        found.given += 1
        found.asked = time.monotonic()
        try:
            return self._next(batches)
        except StopIteration:
            found.done, found.left_behind = True, None
            self._loops.leave(found.loop)
            raise

    def _ends(self, batches: Any, this: _Pass) -> bool:
        if self._loops.ends(this.loop):
            return True
        loops = self._loops
        if loops.steps is None or this.settled or not self._evaluations:
            return False
        if loops.taken != this.taken or loops.backwards != this.backwards:
            this.settled = True  # it trains
            return False
        this.seen.append(_memory())
        if this.given < _BATCHES or this.seen[0].ever == this.seen[-1].ever:
            return False
        left = _batches_left(batches, this.given)
        if (grows := _growth(this.seen)) and self._runs_whole(this, grows, left):
            return False
        this.settled = True
        loops.short[this.loop.where] = "batches"
        return not _skip_to_last(batches, left)

    def _runs_whole(self, this: _Pass, grows: int, left: int | None) -> bool:
        """True for a pass whose memory grows and that is to go on."""
        where = this.loop.where
        each = f"{Path(where).name} keeps {_C.format_size(grows)} a batch"
        if left is None:
            self.kept[where] = f"{each}, of how many is not known: not counted"
            return False
        now, first = time.monotonic(), self.kept.setdefault(where, "")
        if not first or this.whole:
            this.whole = now - this.begun + left * (now - this.asked) < _WHOLE
        if not first:
            count, after = (
                this.given + left,
                "" if this.whole else ", but not what is made of them afterwards",
            )
            self.kept[where] = (
                f"{each}: {_C.format_size(grows * count)} over all {count} batches, counted{after}"
            )
        if not this.whole and left > 1:
            # Without a limit of memory that is there; on a card it may be what runs out.
            this.left_behind = torch.empty(grows * (left - 1), dtype=torch.uint8, device="cuda")
        return this.whole


def _asker(frame: FrameType) -> tuple[str, bool, Loop | None]:
    """The user's line that asks for a batch; whether it is a loop that does, or a library, so that an end is expected;
    and a loop of the script's that does."""
    may_end = not is_user_file(frame.f_code.co_filename) or frame.f_code.co_code[frame.f_lasti] == _FOR_ITER
    asking: FrameType | None = frame
    fed = None
    while asking is not None and not is_user_file(asking.f_code.co_filename):
        if asking.f_code is For.__next__.__code__:
            fed = asking.f_locals["self"].loop
        asking = asking.f_back
    if asking is None:
        return "a loader", may_end, fed
    return f"{asking.f_code.co_filename}:{asking.f_lineno}", may_end, fed


def _memory() -> _Memory:
    if not torch.cuda.is_initialized():
        return _Memory(0, 0, 0)
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocation.all.current", "allocation.all.allocated"
    return _Memory(*(stats.get(name, 0) for name in names))


def _growth(seen: list[_Memory]) -> int:
    """Bytes that each batch adds, and blocks, once the loop's variables are there; 0 where one of them does not."""
    last = seen[-3:]
    steps = [
        (after.bytes - before.bytes, after.blocks - before.blocks)
        for before, after in itertools.pairwise(last)
    ]
    return min(size for size, _ in steps) if all(size > 0 and blocks > 0 for size, blocks in steps) else 0


def _batches_left(batches: Any, given: int) -> int | None:
    try:
        return max(0, len(batches._index_sampler) - given)
    except (TypeError, NotImplementedError):
        return None


def _skip_to_last(batches: Any, left: int | None) -> bool:
    """True where the pass comes to its last batch by itself now."""
    if left is None or left > _SKIPPED or batches._dataset_kind == dataloader._DatasetKind.Iterable:
        return False
    batches._sampler_iter = iter(deque(batches._sampler_iter, maxlen=1))
    return True
