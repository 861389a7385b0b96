"""Messages between ranks beside their model's collectives, always within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from memopt import _C
from memopt._runtime.log import logger

FAILED = 1 << 40  # among numbers that are exchanged: this rank ended with an error of its own


class RankLost(_C.Error):
    """Another rank did not answer within the limit, has ended, or has failed for a reason other than memory."""


class Ranks:
    """The ranks of a process group, by a group of their own over gloo.

    So neither the device nor what the model's collectives wait for is in the way. All of them must make theirs at the
    same point. limit: seconds that any one waits.
    """

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        self.numbers = dist.get_process_group_ranks(group)
        self.limit = limit
        self._side = dist.new_group(
            self.numbers,
            backend="gloo",
            timeout=timedelta(seconds=limit),
            use_local_synchronization=True,  # the other ranks of the world are not called
        )
        self.own = dist.get_rank()

    def exchange(self, *numbers: int) -> list[list[int]]:
        """Those of every rank, in the order of `self.numbers`. RankLost where one does not answer."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in self.numbers]
        try:
            dist.all_gather(found, mine, group=self._side)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.own} waited up to {self.limit:g} s for the others of {self.numbers} to agree on a step, "
                "and one did not answer: it has ended, hangs, or does not call memopt.backward as often "
                f"({_first(error)})"
            ) from error
        said = [one.tolist() for one in found]
        failed = [rank for rank, one in zip(self.numbers, said, strict=True) if one[0] == FAILED]
        if failed and numbers[0] != FAILED:
            raise RankLost(
                f"rank {failed[0]} ended its step with an error of its own, which it has raised there"
            )
        return said

    def fails(self, width: int) -> None:
        """Report a failure in the place of the next exchange, of so many numbers; errors there do not matter."""
        try:
            self.exchange(*(FAILED,) * width)
        except RankLost as error:
            logger.info("an error could not be told to the other ranks: %s", error)


class Verdicts:
    """The end of an attempt for all ranks, by the store that they met at.

    The first one that fails decides, even while the others wait in a collective: a thread of theirs can read it, so
    nothing here waits with a lock held.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        store = distributed_c10d._get_default_store()
        # A connection of its own: another thread may wait on the first.
        self._store: Any = dist.PrefixStore(f"memopt/{'-'.join(map(str, ranks.numbers))}", store.clone())
        self._attempt = 0
        self._lock = threading.Lock()
        self._said: str | None = None

    def begin(self) -> None:
        self._attempt += 1
        self._said = None
        if self._attempt > 2 and self._ranks.own == self._ranks.numbers[0]:
            for name in ("ok", "verdict"):  # of an attempt that all have left
                self._store.delete_key(f"{self._attempt - 2}/{name}")

    def said(self) -> str:
        """The verdict, "" as long as nobody has failed."""
        with self._lock:
            if not self._said and self._store.check([self._key("verdict")]):
                self._said = self._store.get(self._key("verdict")).decode()
                if self._said:
                    self._store.add(self._key("heard"), 1)
            return self._said or ""

    def fail(self, why: str) -> str:
        """Give the verdict, and return it, or that of a rank that was faster.

        The rank that gives it waits until all have heard it, for the store may end with this process: at most the
        limit.
        """
        with self._lock:
            first = not self._said
            if first:
                self._said = self._store.compare_set(self._key("verdict"), "", why).decode() or why
                first = self._said == why
                self._store.add(self._key("heard"), 1)
        until = time.monotonic() + self._ranks.limit
        while first and time.monotonic() < until:
            if self._store.add(self._key("heard"), 0) >= len(self._ranks.numbers):
                break
            time.sleep(0.05)
        return self._said or why

    def ok(self) -> str:
        """Waits for all; "" where every rank is. RankLost where one is not heard of within the limit."""
        if self._store.add(self._key("ok"), 1) == len(self._ranks.numbers):
            self._store.set(self._key("verdict"), "")
        try:
            self._store.wait([self._key("verdict")], timedelta(seconds=self._ranks.limit))
        except RuntimeError as error:
            raise RankLost(
                f"rank {self._ranks.own} heard nothing of how the step went on the other ranks for "
                f"{self._ranks.limit:g} s ({_first(error)})"
            ) from error
        return self.said()

    def wait(self, seconds: float) -> str:
        """For a bad one, so long; "" where none comes, or the store has ended with its process."""
        until = time.monotonic() + seconds
        try:
            while not (said := self.said()) and time.monotonic() < until:
                time.sleep(0.05)
            return said
        except RuntimeError as error:
            logger.info("the ranks' store does not answer: %s", error)
            return self._said or ""

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"


@contextmanager
def limited(groups: list[dist.ProcessGroup], seconds: float) -> Iterator[None]:
    """No collective of these groups waits longer; their own limits are back afterwards."""
    before = [_limit(group) for group in groups]
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    try:
        yield
    finally:
        for group, limit in zip(groups, before, strict=True):
            distributed_c10d._set_pg_timeout(limit, group)


def _limit(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    default: timedelta = distributed_c10d.default_pg_timeout
    return default


def end(groups: list[dist.ProcessGroup]) -> None:
    """End a group. NCCL's collectives, which no exception of another rank ends, come back with an error.

    gloo's have their limit.
    """
    for group in groups:
        try:
            group.abort()
        except RuntimeError as error:
            logger.warning("a process group could not be ended: %s", error)


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
