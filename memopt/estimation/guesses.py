"""What an estimate had to assume: each answer to the script that no value on the device decided, by the asking line.

`fraction` is the one dial of them all. What the model decides (which rows a mask selects) is not known; so an unknown
mask is taken to hold in that part of its places, and an unknown test of one value to fail, or to hold where fraction
is below a half. Between 0 and 1 lies what the script can come to."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from memopt.profiling.user_code import is_user_file


class Guess(NamedTuple):
    kind: str
    what: str
    where: str  # the file's whole path and the line, "….py:41"; "" in a backward pass


# "shape": a tensor's size hangs on it; "test": what the script is told of a mask, or of one truth value; both change
# with `fraction`. "value": another number that it read; "copy": values that it copied to the host.
KINDS = ("shape", "test", "value", "copy")
BY_FRACTION = ("shape", "test")


class Guesses:
    def __init__(self, fraction: float = 1.0) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(
                f"fraction={fraction!r} is the part of an unknown mask that holds: between 0 and 1"
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
        """Of a test that nothing is known of: what an assert statement that asks says, else `otherwise`."""
        return self.asserts.get(_users_line(), otherwise)

    @property
    def hang_on_fraction(self) -> bool:
        """Whether another fraction could give another peak."""
        return any(guess.kind in BY_FRACTION for guess in self._counts)

    def rows(self) -> list[dict[str, Any]]:
        """For JSON: those that decide a shape first; of a kind, the most frequent first."""
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
