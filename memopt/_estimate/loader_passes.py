"""Passes over DataLoaders, which are shortened as loops are (loops.py).

A pass that trains ends after a few steps; one that evaluates after a few batches and its last one. Where batches differ
in size, such as texts padded to the batch's longest, the largest batch that can be read in some seconds takes the place
of the last.

What an evaluation keeps of each batch, such as predictions, grows with the number of batches. Where memory grows with
each batch, the pass runs whole; where that would take long, a block of the size of what the skipped batches would have
left behind replaces them.
"""

from __future__ import annotations

import dis
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from memopt import _C
from memopt._estimate.loops import For, Loop, Loops
from memopt._estimate.script import AllocatedMemory, growth, memory
from memopt._memory.recording.user_code import is_user_file

_BATCHES = 4  # of an evaluation: the difference between two of them is seen twice
_WHOLE = 20.0  # seconds that an evaluation may take whose memory grows
_COMPARED = 10  # first batches, whose sizes tell whether they differ
_READING = 5.0  # seconds for finding the largest batch
_SKIPPED = 1 << 17  # batches whose indices are gone through for those of the last one
_FOR_ITER = dis.opmap["FOR_ITER"]


class _Pass:
    """One pass over a loader.

    `given`: batches so far; `seen`: memory when each was asked for; `settled`: whether it trains or evaluates is known,
    and so is its end; `whole`: it is not to end before its last batch. `sizes`: of the batches so far, in bytes;
    `largest`: the next batch, in a list.
    """

    def __init__(self, loops: Loops, loop: Loop) -> None:
        self._loops, self.loop = loops, loop
        self.given = 0
        self.seen: list[AllocatedMemory] = []
        self.done = self.settled = self.whole = False
        self.backwards, self.taken = loops.backwards, loops.taken
        self.begun = self.asked = time.monotonic()
        self.left_behind: torch.Tensor | None = None
        self.sizes: list[int] = []
        self.largest: list[Any] = []

    def __del__(self) -> None:
        self._loops.leave(self.loop)


class LoaderPasses:
    """Shortening of passes over DataLoaders, for the life of the process; evaluations only if `evaluations` is set.

    `kept`: memory that evaluations keep, and `read`: batches read for the largest one, a sentence each.
    """

    def __init__(self, loops: Loops, evaluations: bool = True) -> None:
        self._loops, self._evaluations = loops, evaluations
        self.kept: dict[str, str] = {}
        self.read: dict[object, str] = {}
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
        if found.largest:
            return found.largest.pop()
        try:
            batch = self._next(batches)
        except StopIteration:
            found.done, found.left_behind = True, None
            self._loops.leave(found.loop)
            raise
        if len(found.sizes) < _COMPARED:
            found.sizes.append(_size(batch))
        return batch

    def _ends(self, batches: Any, this: _Pass) -> bool:
        ends = self._loops.ends(this.loop)
        if (ends or this.loop.last) and self._found_largest(batches, this):
            return False
        if ends:
            return True
        loops = self._loops
        if loops.steps is None or this.settled or not self._evaluations:
            return False
        if loops.taken != this.taken or loops.backwards != this.backwards:
            this.settled = True  # it trains
            return False
        this.seen.append(memory())
        if this.given < _BATCHES or this.seen[0].ever == this.seen[-1].ever:
            return False
        left = _batches_left(batches, this.given)
        if (grows := growth(this.seen)) and self._runs_whole(this, grows, left):
            return False
        this.settled = True
        loops.short[this.loop.where] = "batches"
        return not self._found_largest(batches, this) and not _skip_to_last(batches, left)

    def _found_largest(self, batches: Any, this: _Pass) -> bool:
        """Return whether the next batch is the largest of those left in a pass with batches of different sizes; once
        for each place."""
        place = this.loop.place
        if place in self.read or len(set(this.sizes)) < 2:
            return False
        begun, count, size = time.monotonic(), this.given, 0
        total = (left := _batches_left(batches, this.given)) and left + this.given
        while time.monotonic() - begun < _READING:
            try:
                batch = self._next(batches)
            except StopIteration:
                total = count
                break
            count += 1
            if (its := _size(batch)) > size:
                this.largest[:], size = [batch], its
        if not this.largest:
            return False
        of = "" if count == total else f" of {total or 'an unknown number'}, as read in {_READING:.0f} s"
        where = Path(this.loop.where).name
        self.read[place] = f"{where}: batches differ in size; the last one run is the largest of {count}{of}"
        return True

    def _runs_whole(self, this: _Pass, grows: int, left: int | None) -> bool:
        """Return whether a pass whose memory grows is to go on."""
        where = this.loop.where
        each = f"{Path(where).name} keeps {_C.format_size(grows)} a batch"
        if left is None:
            self.kept[where] = f"{each}; the number of batches is unknown: not counted"
            return False
        now, first = time.monotonic(), self.kept.setdefault(where, "")
        if not first or this.whole:
            this.whole = now - this.begun + left * (now - this.asked) < _WHOLE
        if not first:
            count, after = (
                this.given + left,
                "" if this.whole else ", but not what the script computes from them afterwards",
            )
            self.kept[where] = (
                f"{each}: {_C.format_size(grows * count)} over all {count} batches, counted{after}"
            )
        if not this.whole and left > 1:
            # Without a limit of memory that is there; on a card it may be what runs out.
            this.left_behind = torch.empty(grows * (left - 1), dtype=torch.uint8, device="cuda")
        return this.whole


def _size(batch: Any, depth: int = 5) -> int:
    """Return the bytes of the tensors and arrays in a batch of any kind."""
    if isinstance(size := getattr(batch, "nbytes", None), int):
        return size
    if isinstance(batch, str | bytes | int | float | None) or not depth:
        return 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return sum(_size(part, depth - 1) for part in parts or getattr(batch, "__dict__", {}).values())


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


def _batches_left(batches: Any, given: int) -> int | None:
    try:
        return max(0, len(batches._index_sampler) - given)
    except (TypeError, NotImplementedError):
        return None


def _skip_to_last(batches: Any, left: int | None) -> bool:
    """Return whether the pass now reaches its last batch by itself."""
    if left is None or left > _SKIPPED or batches._dataset_kind == dataloader._DatasetKind.Iterable:
        return False
    batches._sampler_iter = iter(deque(batches._sampler_iter, maxlen=1))
    return True
