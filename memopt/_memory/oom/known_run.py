"""A recorded run up to the request that failed, continued by what followed the same point of the iteration before.

A change can be tested on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from memopt._memory.recording.recording import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    WORKSPACES,
    Recording,
)

NEVER = 1 << 60  # the time at which a block dies that lives at the end
_TICKS = 4  # of time between two events, so that something can happen there
_FEWEST = 4  # requests by which an iteration is recognised, if there have been no more of it
_AGREE = 8  # and if there have been
_PLACES = 256  # that are looked at
_OWNED = (PARAMETERS, GRADIENTS, OPTIMIZER)


class FirstStepRequests(NamedTuple):
    """Requests of an optimizer's first step: sizes that stay, and sizes that are alive together while it runs."""

    states: list[int]
    passing: list[int]


@dataclass(frozen=True)
class BlockTable:
    """Blocks as columns, in the order of their births.

    Times have no unit. `there`: False for blocks that a change removes.
    """

    born: torch.Tensor
    died: torch.Tensor
    size: torch.Tensor
    stream: torch.Tensor
    category: torch.Tensor
    there: torch.Tensor

    def __len__(self) -> int:
        return len(self.born)

    def chosen(self, which: torch.Tensor) -> BlockTable:
        return BlockTable(*(column[which] for column in self._columns()))

    def with_more(self, more: BlockTable) -> BlockTable:
        return BlockTable(*(torch.cat(pair) for pair in zip(self._columns(), more._columns(), strict=True)))

    def _columns(self) -> tuple[torch.Tensor, ...]:
        return self.born, self.died, self.size, self.stream, self.category, self.there

    def live_bytes_at(self, time: int) -> int:
        alive = self.there & (self.born <= time) & (self.died > time)
        return int(self.size[alive].sum())

    def operations(self) -> torch.Tensor:
        """Return [n, 3]: a block's number, its size (0: it is freed) and its stream, in order."""
        number = self.there.nonzero().flatten()
        dies = number[self.died[number] < NEVER]
        time = torch.cat((2 * self.born[number] + 1, 2 * self.died[dies]))  # of one time, a free comes first
        rows = torch.stack(
            (
                torch.cat((number, dies)),
                torch.cat((self.size[number], torch.zeros_like(dies))),
                torch.cat((self.stream[number], self.stream[dies])),
            ),
            dim=1,
        )
        return rows[torch.argsort(time, stable=True)]


@dataclass(frozen=True)
class KnownRun:
    """A recorded run that ends with a failed request.

    `blocks`: all blocks, the failed request last; `address`: of each, 0 for that one. `failed`: its time. `steps`:
    times of the ends of optimizers' steps. `lag`: number of births since the same point of the iteration before, 0 if
    not known.
    """

    blocks: BlockTable
    address: torch.Tensor
    failed: int
    steps: torch.Tensor
    lag: int
    workspaces: torch.Tensor  # bool: of cuBLAS, which an iteration asks for once for all

    def completed(self, changed: BlockTable) -> BlockTable | None:
        """Return the run with one iteration after it, None if no iteration is known. `changed`: its blocks with a
        change made."""
        if not self.lag:
            return None
        last = len(changed) - 1
        same = last - self.lag  # the block of the iteration before that the failed request stands for
        begin = int(changed.born[same])
        category, there = changed.category.clone(), changed.there.clone()
        category[last], there[last] = category[same], there[same]
        died = changed.died.clone()
        ended = ((died > begin) & (died < NEVER)).nonzero().flatten()
        ended = ended[ended + self.lag <= last]
        died[ended + self.lag] = torch.minimum(died[ended + self.lag], self._later(died[ended], begin))
        blocks = replace(changed, died=died, category=category, there=there)
        again = torch.arange(same + 1, last + 1)
        stays = torch.isin(category[again], torch.tensor(_OWNED)) & (died[again] == NEVER)
        again = again[~stays]
        more = blocks.chosen(again)
        # What stays and was not there one iteration before, as of an evaluation between, is taken to have a name that
        # is bound anew. What was there stays again: it grows.
        once = (died[again] == NEVER) & (again >= self.lag)
        once &= blocks.size[(again - self.lag).clamp(min=0)] != blocks.size[again]
        blocks.died[again[once]] = self._later(blocks.born[again[once]], begin) + 1
        # Of the copies dies what its original's original did, which by now has the original's place.
        back = torch.where(once, NEVER, died[again])
        more = replace(
            more,
            born=self._later(more.born, begin),
            died=torch.where(back < NEVER, self._later(back, begin), NEVER),
        )
        return blocks.with_more(more)

    def _later(self, time: torch.Tensor, begin: int) -> torch.Tensor:
        return time - begin + self.failed

    def first_iteration_again(self, plan: FirstStepRequests) -> BlockTable | None:
        """Continue a run that failed in its first optimizer step: that step by a plan, an iteration, and the next step.

        Gradients stay throughout: whether they are freed before the next backward pass is not known.
        """
        blocks = self.blocks
        here = torch.arange(len(blocks))
        stepping = (blocks.category == OPTIMIZER).nonzero().flatten()
        begin = int(stepping[0]) if len(stepping) else len(blocks) - 1
        at = int(blocks.born[begin])
        before = (here < begin) & ~self.workspaces
        first = (
            (before & torch.isin(blocks.category, torch.tensor((ACTIVATIONS, INPUTS)))).nonzero().flatten()
        )
        if not len(first):
            return None
        start = int(blocks.born[first[0]])
        again = (before & (here >= first[0]) & (blocks.category != PARAMETERS)).nonzero().flatten()
        one, two = (
            at + 4 * _TICKS,
            2 * at - start + 8 * _TICKS,
        )  # of the iteration again, and the step after it

        def later(time: torch.Tensor) -> torch.Tensor:
            return time - start + one

        died = blocks.died.clone()
        died[died >= at] = NEVER
        left = again[(died[again] == NEVER) & (blocks.category[again] != GRADIENTS)]
        died[left] = later(blocks.born[left]) + 1  # its name is bound anew
        kept = replace(blocks, died=died).chosen(here < begin)
        more = blocks.chosen(again)
        ends = torch.where(blocks.died[again] < at, later(blocks.died[again]), NEVER)
        gradients = more.category == GRADIENTS
        ends[gradients] = later(more.born[gradients]) + 2
        more = replace(more, born=later(more.born), died=ends)
        stream = int(blocks.stream[begin])
        return (
            kept.with_more(_made(plan.states, at, NEVER, stream))
            .with_more(_made(plan.passing, at + 1, at + 2, stream))
            .with_more(more)
            .with_more(_made(plan.passing, two, two + 1, stream))
        )


def _made(sizes: Sequence[int], born: int, died: int, stream: int) -> BlockTable:
    size = torch.tensor([one for one in sizes if one], dtype=torch.int64)
    full = torch.full_like
    return BlockTable(
        full(size, born),
        full(size, died),
        size,
        full(size, stream),
        full(size, OPTIMIZER),
        full(size, 1).bool(),
    )


def known_run(recording: Recording) -> KnownRun | None:
    """Return the run up to the failed request in a recording, None if no request failed.

    The size in the allocator's message is not that of the request: for a small block the allocator wants a segment.
    """
    events = [mark.event for mark in recording.marks if mark.kind == "oom"]
    if not events or not recording.facts.get("asked"):
        return None
    event, columns = events[-1], recording.columns
    asked, stack = recording.facts["asked"][-1]
    seen = (columns["born"] <= event).nonzero().flatten()
    # Workspaces first: then an iteration is as many blocks as it was before, in which they may have been made.
    first = _workspaces(columns, event)[seen]
    seen = seen[torch.argsort(torch.where(first, -2, columns["born"][seen]), stable=True)]
    failed = (event + 1) * _TICKS
    died = columns["died"][seen]
    more = {"born": failed, "died": NEVER, "size": asked, "stream": 0, "category": OTHER}
    if len(seen):
        more["stream"] = int(columns["stream"][seen[-1]])
    values = {name: columns[name][seen] for name in ("size", "stream", "category")} | {
        "born": columns["born"][seen] * _TICKS,
        "died": torch.where(died > event, NEVER, died * _TICKS),
    }
    blocks = BlockTable(
        **{name: torch.cat((values[name], torch.tensor([more[name]]))) for name in more},
        there=torch.ones(len(seen) + 1, dtype=torch.bool),
    )
    steps = torch.tensor(
        [mark.event * _TICKS + 1 for mark in recording.marks if mark.kind == "step" and mark.event <= event],
        dtype=torch.int64,
    )
    run = KnownRun(
        blocks,
        torch.cat((columns["address"][seen], torch.tensor([0]))),
        failed,
        steps,
        0,
        torch.cat((_workspaces(columns, event)[seen], torch.tensor([False]))),
    )
    kinds = torch.stack([columns[name][seen] for name in ("size", "module", "stack")])
    return replace(run, lag=_lag(run, kinds, stack))


def _workspaces(columns: dict[str, torch.Tensor], event: int) -> torch.Tensor:
    like = torch.isin(columns["size"], torch.tensor(WORKSPACES)) & (columns["category"] == OTHER)
    return like & (columns["died"] > event)


# ---- where the iteration before was at the same point ----------------------------------------------------------------


def _lag(run: KnownRun, kinds: torch.Tensor, stack: int) -> int:
    """Return the number of births since the same point of the iteration before.

    kinds: [3, blocks before the failed one]: size, module, stack; stack: of the failed one, 0: not known.
    """
    counted = (~run.workspaces[:-1] & (run.blocks.born[:-1] >= 0)).nonzero().flatten()
    asked = int(run.blocks.size[-1])
    number = torch.unique(kinds[:, counted], dim=1, return_inverse=True)[1] if len(counted) else counted
    last_step = int(run.steps[-1]) if len(run.steps) else -1
    born = run.blocks.born[counted]
    since = int((born > last_step).sum())
    lag = _repeats(run, kinds, number, counted, asked, since)
    if not lag and len(run.steps):
        alike = kinds[0, counted] == asked
        lag = _found_before(number, alike, since)
        if not lag and stack and len(run.steps) > 1:
            # Of a line that asks for so much once a step there is only one place.
            alike &= (kinds[2, counted] == stack) & (born > int(run.steps[-2])) & (born <= last_step)
            places = alike.nonzero().flatten().tolist()
            lag = len(counted) - places[0] if len(places) == 1 else 0
    return lag


def _repeats(
    run: KnownRun, kinds: torch.Tensor, number: torch.Tensor, counted: torch.Tensor, asked: int, since: int
) -> int:
    """Return the length of the shortest cycle that the end of the run shows twice.

    It contains an optimizer's step or, in an evaluation, requests within a module and outside all modules.
    """
    backwards = number.flip(0)
    count = len(backwards)
    if count < 2 * _FEWEST:
        return 0
    lengths = _equal_halves(backwards)
    for lag in lengths[:64].tolist():
        before = int(counted[count - lag])
        modules = kinds[1, counted[count - lag :]]
        whole = lag > since if len(run.steps) and since < count else False
        evaluation = not whole and bool((modules == 0).any()) and bool((modules > 0).any())
        if (whole or evaluation) and lag >= _FEWEST and int(kinds[0, before]) == asked:
            return int(lag)
    return 0


def _equal_halves(values: torch.Tensor) -> torch.Tensor:
    """Return all n for which values[:n] == values[n:2n], ascending, by sums that are as good as unique."""
    count = len(values)
    generator = torch.Generator().manual_seed(1)
    number_of = torch.randint(1, 1 << 62, (int(values.max()) + 1,), generator=generator)
    power = torch.full((count,), 6364136223846793005).cumprod(0)  # modulo 2**64
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), (number_of[values] * power).cumsum(0)))
    n = torch.arange(1, count // 2 + 1)
    return n[sums[n] * power[n - 1] == sums[2 * n] - sums[n]]


def _found_before(number: torch.Tensor, alike: torch.Tensor, since: int) -> int:
    """Return the place before the last step where the same requests came in the same order and then one that is alike.

    Of several places it is the one with the longest agreement, which need not reach back to the step: an evaluation may
    lie between.
    """
    count = len(number)
    follows = alike[: count - since].nonzero().flatten()
    if since < _FEWEST:
        return 0
    for back in range(1, _FEWEST + 1):
        follows = follows[follows >= back]
        follows = follows[number[follows - back] == number[count - back]]
    best, length = 0, min(since, _AGREE) - 1
    for place in follows.flip(0)[:_PLACES].tolist():
        most = min(place, since)
        differs = number[place - most : place].flip(0) != number[count - most :].flip(0)
        agrees = int(differs.int().argmax()) if bool(differs.any()) else most
        if agrees > length:
            best, length = count - place, agrees
    return best
