"""Checkpointing a chain, from its definition: what a schedule takes, and the best there is, by exhaustive search.
Written from the words of memopt.chain, and of none of its code."""

from __future__ import annotations

import heapq
import math
from functools import cache

from memopt.chain import Chain, Option, Stage


class Sizes:
    """A chain as plain lists: a[i], d[i], and each stage's ways to run in full, the first being its own."""

    def __init__(self, chain: Chain, unit: int = 1) -> None:
        def up(size: int) -> int:
            return -(-size // unit)

        stages = chain.stages
        a = [chain.input_bytes, *(stage.output_bytes for stage in stages)]
        d = [a[i] if s.input_grad_bytes is None else s.input_grad_bytes for i, s in enumerate(stages)]
        d.append(a[-1] if chain.output_grad_bytes is None else chain.output_grad_bytes)
        self.n, self.a, self.d = len(stages), [up(size) for size in a], [up(size) for size in d]
        self.ways = [[_way(way, up) for way in (stage, *stage.options)] for stage in stages]
        self.names = [["", *(option.name for option in stage.options)] for stage in stages]
        self.put = [stage.put_input_seconds if i else None for i, stage in enumerate(stages)]
        self.get = [stage.get_input_seconds for stage in stages]


class _way:
    def __init__(self, way: Stage | Option, up) -> None:
        self.saved, self.of, self.ob = (
            up(way.saved_bytes),
            up(way.forward_overhead_bytes),
            up(way.backward_overhead_bytes),
        )
        self.uf, self.ub = way.forward_seconds, way.backward_seconds
        self.ue = self.uf if way.remake_seconds is None else way.remake_seconds


def replay(chain: Chain, ops) -> tuple[float, int]:
    """(seconds, peak bytes) of a schedule; AssertionError where an operation lacks what it needs."""
    c = Sizes(chain)
    # a[i] in their own right, but a[0]; a[i] off the device; s[i]: its option; whose gradient there is
    inputs, away, saved, grad = set(), set(), {}, c.n
    seconds, peak = 0.0, 0

    def held() -> int:
        return sum(c.a[i] for i in inputs) + sum(c.ways[i][k].saved for i, k in saved.items()) + c.d[grad]

    peak = held()
    for at, (op, i, *option) in enumerate(ops):
        k = c.names[i].index(option[0]) if option else 0
        here = i == 0 or i in inputs or i - 1 in saved
        if op in ("fnone", "fck"):
            assert here and i + 1 not in inputs and i not in saved, (at, op, i)
            inputs.add(i + 1)
            peak = max(peak, held() + c.ways[i][0].of)
            seconds += c.ways[i][0].uf
            if op == "fnone":
                inputs.discard(i)
        elif op == "fall":
            assert here and i not in saved, (at, op, i)
            saved[i] = k
            peak = max(peak, held() + c.ways[i][k].of)
            early = ops[at + 1 : at + 2] and ops[at + 1][:2] == ("bwd", i)
            seconds += c.ways[i][k].ue if early else c.ways[i][k].uf
        elif op == "bwd":
            assert here and saved.get(i) == k and grad == i + 1, (at, op, i)
            peak = max(peak, held() + c.d[i] + c.ways[i][k].ob)
            seconds += c.ways[i][k].ub
            del saved[i]
            inputs.discard(i)
            grad = i
        elif op == "drop_input":
            assert i > 0 and here, (at, op, i)
            inputs.discard(i)
        elif op == "put_input":
            assert i in inputs and c.put[i] is not None, (at, op, i)
            inputs.discard(i)
            away.add(i)
            seconds += c.put[i]
        elif op == "get_input":
            assert i in away and not here, (at, op, i)
            away.discard(i)
            inputs.add(i)
            peak = max(peak, held())
            seconds += c.get[i]
        else:
            assert op == "drop_saved", (at, op, i)
            del saved[i]
    assert grad == 0, "the step is not finished"
    return seconds, peak


def exhaustive(c: Sizes, budget: int) -> float:
    """The least seconds of any sequence of operations whose peak is no more than the budget; inf: there is none.

    A* over the states (next backward, inputs, inputs off the device, saved sets): what is still to be done takes at
    least each stage's fastest backward, and its fastest forward where nothing is saved of it."""
    fastest = [min(w.ub for w in ways) for ways in c.ways]
    remake = [min(min(w.uf, w.ue) for w in ways) for ways in c.ways]

    def bound(b, saved):
        return sum(fastest[: b + 1]) + sum(remake[i] for i in range(b + 1) if saved[i] < 0)

    start = (c.n - 1, frozenset(), frozenset(), (-1,) * c.n)
    if c.d[c.n] > budget:
        return math.inf
    best, queue, ticket = {start: 0.0}, [(bound(start[0], start[3]), 0, 0.0, start)], 0
    while queue:
        _, _, seconds, state = heapq.heappop(queue)
        b, inputs, away, saved = state
        if b < 0:
            return seconds
        if seconds > best[state]:
            continue
        free = budget - c.d[b + 1] - sum(c.a[i] for i in inputs)
        free -= sum(c.ways[i][k].saved for i, k in enumerate(saved) if k >= 0)
        after = []
        for i in inputs:
            after.append((0.0, b, inputs - {i}, away, saved))
            if i < c.n and c.put[i] is not None:
                after.append((c.put[i], b, inputs - {i}, away | {i}, saved))
        for i in away:
            if i not in inputs and saved[i - 1] < 0 and c.a[i] <= free:
                after.append((c.get[i], b, inputs | {i}, away - {i}, saved))
        for i in range(b + 1):
            if saved[i] >= 0:
                after.append((0.0, b, inputs, away, (*saved[:i], -1, *saved[i + 1 :])))
            if i and i not in inputs and saved[i - 1] < 0:
                continue
            if i < b and i + 1 not in inputs and saved[i] < 0 and c.a[i + 1] + c.ways[i][0].of <= free:
                after.append((c.ways[i][0].uf, b, inputs | {i + 1}, away, saved))
                after.append((c.ways[i][0].uf, b, (inputs | {i + 1}) - {i}, away, saved))
            for k, w in enumerate(c.ways[i]):
                if saved[i] < 0 and w.saved + w.of <= free:
                    after.append((w.uf, b, inputs, away, (*saved[:i], k, *saved[i + 1 :])))
                fits = c.d[b] + w.ob <= free - (w.saved if saved[b] < 0 else 0)
                if i == b and fits and saved[b] == k:
                    after.append((w.ub, b - 1, inputs - {b}, away - {b}, (*saved[:b], -1, *saved[b + 1 :])))
                if i == b and fits and saved[b] < 0 and w.saved + w.of <= free:
                    after.append((w.ue + w.ub, b - 1, inputs - {b}, away - {b}, saved))
        for took, *then in after:
            reached, total = (then[0], then[1], then[2], then[3]), seconds + took
            if total < best.get(reached, math.inf):
                best[reached] = total
                ticket += 1
                queue_bound = total + bound(then[0], then[3])
                heapq.heappush(queue, (queue_bound, ticket, total, reached))
    return math.inf


def persistent(c: Sizes, budget: int) -> float:
    """The least seconds of a persistent schedule: the recurrence of the paper, with options, early stop, and inputs
    that are put away."""

    @cache
    def least(s: int, t: int, m: int, puts: bool = False) -> float:
        """puts: a[s] is counted in m, and may be put away."""
        own, away = (c.a[s], c.put[s] + c.get[s]) if puts else (0, 0.0)
        found = least(s, t, m - own) if puts and m >= own else math.inf
        for w in c.ways[s]:
            if s == t:
                if not puts and m >= c.d[t + 1] + w.saved + max(w.of, c.d[s] + w.ob):
                    found = min(found, w.ue + w.ub)
            elif m >= own + w.saved + max(c.d[t + 1] + w.of, c.d[s + 1] + c.d[s] + w.ob):
                found = min(found, w.uf + w.ub + away + least(s + 1, t, m - w.saved))
        need, ran = 0, away
        for j in range(s + 1, t + 1):
            kept = c.a[j - 1] if j > s + 1 else own
            need = max(need, c.d[t + 1] + kept + c.a[j] + c.ways[j - 1][0].of)
            ran += c.ways[j - 1][0].uf
            if m >= need and m >= c.a[j]:
                later = least(j, t, m, True) if c.put[j] is not None else least(j, t, m - c.a[j])
                found = min(found, ran + later + least(s, j - 1, m, puts))
        return found

    return least(0, c.n - 1, budget)
