"""Programs of the processes of test_shared_passing.py. Without torch, whose import takes longer than all else there."""

from __future__ import annotations

from pathlib import Path

from memopt.data import SharedStrings

ITEMS = ["a", "ü", ("x", 2), None, 10**30]


class Mine(SharedStrings):
    __slots__ = ()


def memories() -> int:
    """The number of shared memories that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memopt-shared")


def answer(shared, part, strings, again, queue, ready) -> None:
    found = {
        "list": list(shared)[: len(ITEMS)],
        "array": shared[len(ITEMS)].sum().item(),
        "part": list(part),
        "kinds": [type(part).__name__, type(strings).__name__],
        "strings": list(strings),
        "memories": memories(),
    }
    queue.put(found)
    queue.put(again.get()[1:])  # from process to process
    ready.wait(600)
