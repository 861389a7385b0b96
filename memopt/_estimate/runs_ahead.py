"""Runs that a search is likely to ask for next, made while it waits for another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

_Asked = TypeVar("_Asked", bound=Hashable)
_Told = TypeVar("_Told")
_QUEUED = 16


class RunsAhead(Generic[_Asked, _Told]):
    """The results of `run`, each of which is made once; at most `jobs` are made at a time.

    What is waited for runs in the thread that waits, behind nothing else. The rest, jobs - 1 at a time, may turn out to
    be of no use: leaving the block gives up what has not begun, and does not wait for what has.
    """

    def __init__(self, run: Callable[[_Asked], _Told], jobs: int = 1) -> None:
        self._run = run
        self._pool = ThreadPoolExecutor(jobs - 1) if jobs > 1 else None
        self._begun: dict[_Asked, Future[_Told]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def result(self, asked: _Asked) -> _Told:
        """Return the result, once there is one. Raises what the run raises."""
        begun = self._begun.get(asked)
        if begun is None or begun.cancel():
            begun = self._begun[asked] = Future()
            try:
                begun.set_result(self._run(asked))
            except Exception as error:
                begun.set_exception(error)
        return begun.result()

    def expect(self, likely: Iterable[_Asked], beside: _Asked | None = None) -> None:
        """Begin these, the likeliest first, in the place of what was expected before and has not begun; but not what
        they are made beside, which is waited for next. Of many the first few are enough until the next call."""
        if self._pool is None:
            return
        self._begun = {asked: begun for asked, begun in self._begun.items() if not begun.cancel()}
        new = (asked for asked in likely if asked != beside and asked not in self._begun)
        for asked in itertools.islice(new, _QUEUED):
            self._begun[asked] = self._pool.submit(self._run, asked)
