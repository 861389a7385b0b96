"""When the copies of offloaded sets are made: a schedule for the chain's solver, with operations for its runner.

To the solver a set leaves while its own stage runs forwards and returns while it runs backwards, whole in both. Where
the budget leaves room, copies get more time: "sent", which waits for a set's copies and lets its memory go, comes after
the next stage's run, and "fetch" before the backward of the stage behind it. So they overlap with those too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memopt.chain import Op, Schedule
from memopt.checkpointing.chain_offload import OPTION

RUNS = ("fall", "fck", "fnone")


def with_copies(
    schedule: Schedule, during: Sequence[int], nbytes: Sequence[int], memory_budget: int, *, beside: bool
) -> tuple[list[Op], int]:
    """The operations for the runner, options of no concern to it left out; and the peak.

    during: bytes that are there at each operation. nbytes: of each stage's set. beside: whether copies run beside the
    computation; else nothing is won by giving them time."""
    ops, there = schedule.ops, list(during)
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)

    def room(first: int, last: int, more: int) -> bool:
        """Takes `more` bytes during these operations, if they are there."""
        fits = all(there[n] + more <= memory_budget for n in range(first, last + 1))
        if fits:
            for n in range(first, last + 1):
                there[n] += more
        return fits

    for at, (op, k, *option) in enumerate(ops):
        if not beside or op != "fall" or option != [OPTION]:
            continue
        end = next(n for n in range(at, len(ops)) if ops[n][:2] in (("bwd", k), ("drop_saved", k)))
        following = next((n for n in range(at + 1, end) if ops[n][0] in RUNS), None)
        behind = next((n for n in reversed(range(at + 1, end)) if ops[n][0] == "bwd"), None)
        if following is not None and room(at + 1, following, nbytes[k]):
            after[following].append(("sent", k))
        if ops[end][0] == "bwd" and behind is not None and room(behind, end - 1, nbytes[k]):
            before[behind].append(("fetch", k))
    out: list[Op] = []
    for n, (op, k, *option) in enumerate(ops):
        out += [*before[n], (op, k, OPTION) if option == [OPTION] else (op, k), *after[n]]
    return out, max(there)
