"""The assumptions of an estimate: answers to the script that no value on the device decided, by source line.

`fraction` scales them all. Values that the model computes (which rows a mask selects) are not known. An unknown mask is
assumed true in that fraction of its places; an unknown test of one value is assumed false, or true if fraction is below
a half. Runs with 0 and 1 bound the script's need.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from memopt._memory.recording.user_code import is_user_file


class Guess(NamedTuple):
    kind: str
    what: str
    where: str  # the file's whole path and the line, "….py:41"; "" in a backward pass


# "shape": a tensor's size depends on it; "test": the answer about a mask, or about one boolean; both change
# with `fraction`. "value": another number that it read; "copy": values that it copied to the host.
KINDS = ("shape", "test", "value", "copy")
BY_FRACTION = ("shape", "test")


class Guesses:
    def __init__(self, fraction: float = 1.0) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(
                f"fraction={fraction!r} must lie between 0 and 1: it is the true part of an unknown mask"
            )
        self.fraction = fraction
        self.asserts: dict[
            tuple[str, int], bool
        ] = {}  # lines of the script that assert something: whether it holds
        self._counts: Counter[Guess] = Counter()

    def add(self, kind: str, what: str) -> None:
        file, line = _users_line()
        self._counts[Guess(kind, what, f"{file}:{line}" if file else "")] += 1

    def holds(self, otherwise: bool) -> bool:
        """Answer a test of unknown values: as an assert statement asserts it, else `otherwise`."""
        return self.asserts.get(_users_line(), otherwise)

    def forget(self) -> None:
        """Drop the guesses of the process that this one was forked from."""
        self._counts.clear()

    @property
    def hang_on_fraction(self) -> bool:
        """Whether another fraction could give another peak."""
        return any(guess.kind in BY_FRACTION for guess in self._counts)

    def rows(self) -> list[dict[str, Any]]:
        """Return JSON-able rows: those that decide a shape first; of a kind, the most frequent first."""
        order = sorted(self._counts.items(), key=lambda item: (KINDS.index(item[0].kind), -item[1], item[0]))
        return [guess._asdict() | {"count": count} for guess, count in order]


def _users_line() -> tuple[str, int]:
    """The innermost line that is the user's, not torch's, Python's or ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0
