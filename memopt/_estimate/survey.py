"""The parent process of an estimate: it chooses the runs, and combines their answers.

A run on the card tells whether the script fits and where it ends; one on a card without limit, how much it needs. What
only hardware knows is run at both ends: cuDNN's workspaces, and the number of elements that a computed mask selects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from memopt import _C
from memopt._estimate import advice, cards
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.prediction import SIMULATED, Backend, Estimate
from memopt._estimate.protection import Protection
from memopt._estimate.request import SHORTEN, BatchOption, Request
from memopt._estimate.runs_ahead import RunsAhead
from memopt._estimate.search import Tried
from memopt._estimate.step_time import seconds
from memopt._run.plan import BACKENDS, KEEPS, named, plain
from memopt._runtime.process import ChildFailed

# A convolution's plan may want this much and more; torch takes one with less where it does not fit.
CUDNN_WORKSPACE = 256 << 20
MOST_BATCH = 1 << 20
# Fractions of a mask that stand for "nearly nothing": a script may fail where it is none at all.
_FEW = (0.0, 1 / 64)
_RANKS = 8  # of which each is run
# What a run with a technique may take: so many times what the script's own took.
_TIMES, _LEAST_SECONDS = 20.0, 60.0
NOT_MET, NO_RESULT = "nothing in the script takes", "no result: "

Run = Callable[[Request], Answer]


class ScriptFailed(RuntimeError):
    """The script ended for a reason of its own. `answer`: what was seen until then."""

    def __init__(self, answer: Answer, protected: Protection | None = None) -> None:
        text = f"it ended with status {answer.exit_status}" if answer.stopped == "exit" else "it failed"
        said = answer.error or answer.more.get("output")
        text = f"{text}: {said}" if said else text
        denied = protected and "PermissionError" in str(said) and protected.denied_memory()
        super().__init__(f"{text}\n  {denied}" if denied else text)
        self.answer = answer


class NothingToTell(ScriptFailed):
    """The script has not come to what an estimate is about; the message says to what."""

    def __init__(self, answer: Answer, why: str) -> None:
        RuntimeError.__init__(self, f"{NO_RESULT}{why}")
        self.answer = answer


@dataclass
class Survey:
    """The runs of an estimate.

    `run` answers a request; `shown` is the first, whose script the user sees. `request` has no limit of memory.
    """

    title: str
    request: Request
    run: Run
    shown: Run
    card: Card | None = None
    batch: BatchOption | None = None
    jobs: int = 1
    say: Callable[[str], None] = lambda text: None
    runs: int = 0
    shorten: str = SHORTEN[0]  # what of the script's loops, so that it does not fail

    # ---- single runs -----------------------------------------------------------------------------------------------

    def _ask(self, request: Request, what: str, run: Run | None = None) -> Answer:
        self.say(what)
        self.runs += 1
        answer, self.shorten = _asked_with_less_shortened(
            run or self.run, replace(request, shorten=self.shorten)
        )
        if answer.failed:
            raise ScriptFailed(answer, request.protection_of())
        if why := _not_described(answer, request.steps):
            raise NothingToTell(answer, why)
        return answer

    def _on(self, card: Card, request: Request) -> Request:
        return replace(request.like(card), memory=card.usable_bytes)

    def _completes(self, request: Request, card: Card, free: Answer | None, what: str) -> bool:
        """Return whether a request runs on a card; `free`, its run without a limit, often decides that already."""
        contexts = card.context_bytes * (1 if free is None else free.contexts)
        if free is not None and free.held + contexts <= card.usable_bytes:
            return True
        if free is not None and free.peak_allocated + contexts > card.usable_bytes:
            return False
        return self._ask(self._on(card, request), what).completed

    def runs_on(self, card: Card) -> bool:
        """Return whether the script is sure to run on a card, cuDNN's workspaces included."""
        workspace = self.request.cudnn_workspace or CUDNN_WORKSPACE
        asked = [self.request, replace(self.request, cudnn_workspace=workspace)]
        return all(self._ask(self._on(card, one), f"on {card}").completed for one in asked)

    def highest_rank(self) -> dict[str, Any]:
        """Make the request that of the rank with the highest peak.

        A model that is parallelized here is alike on all ranks, but for sizes that do not divide, of which rank 0 has
        most. Of more than eight ranks a few are run.
        """
        count = self.request.ranks
        several = range(count) if count <= _RANKS else sorted({0, 1, count // 2, count - 1})
        ranks = [0] if self.request.spread else list(several)
        asked = [(replace(self.request, rank=rank), f"rank {rank} of {count}") for rank in ranks]
        answers = self._several(asked) if len(asked) > 1 else []
        peaks = {rank: answer.peak_allocated for rank, answer in zip(ranks, answers, strict=False)}
        rank = max(peaks, key=lambda rank: peaks[rank], default=0)
        self.request = replace(self.request, rank=rank)
        return {"count": count, "rank": rank, "spread": self.request.spread, "peaks": peaks}

    # ---- the answer ------------------------------------------------------------------------------------------------

    def estimate(
        self,
        *,
        ranges: bool = True,
        compare: bool = True,
        fixes: bool = True,
        advise: bool = True,
        lean: bool = False,
    ) -> Estimate:
        """Estimate the request as it is.

        `ranges`: run at both ends of unknown values; `compare`: with the other allocators; `fixes`: search for a batch
        size that fits if this one does not; `advise`: and, with `compare`, for other changes; `lean`: without the runs
        that decide nothing where tensors alone fill the card. Raises ScriptFailed if the script fails by itself,
        ChildFailed if no child answers.
        """
        limited, told = None, replace(self.request, record=True)
        if self.card is not None and not lean:
            limited = self._ask(self._on(self.card, told), f"{self.title} on {self.card}", self.shown)
        if limited is not None and limited.completed and not limited.retries:
            free = limited
        else:
            shown = self.shown if limited is None else None
            free = self._ask(told, f"{self.title} on a card without limit", shown)
        if told.backend == "pool" and free.oom is None and free is not limited:
            told = self._with_backend("pool", free.peak_allocated, told)
            free = self._ask(told, f"{self.title} on {_C.format_size(told.memory)}")
        if free.oom is not None:
            raise ChildFailed(f"it requests more than {_C.format_size(cards.NO_LIMIT)}: {free.oom}")
        said = limited if limited is not None and limited.oom else free
        found = Estimate(
            title=self.title,
            method=SIMULATED,
            allocated_bytes=(free.peak_allocated,) * 2,
            reserved_bytes=(free.held,) * 2,
            context_bytes=(self.card.context_bytes if self.card else cards.CONTEXT) * free.contexts,
            card=self.card,
            oom=limited.oom if limited is not None else None,
            retries=limited.retries if limited is not None else 0,
            moments=free.more.get("moments"),
            before_training=free.more.get("before_training") if free.processes is None else None,
            trained_bytes=free.more.get("trained_bytes") or 0,
            held_bytes=free.held,
            host_bytes=free.more.get("host_bytes") or 0,
            keeps=[*KEEPS] if (keeps := free.more.get("keeps")) is None else keeps,
            **free.told() | {"covered": said.covered, "simulated": said.simulated},
        )
        outcomes = [] if limited is None else [limited.completed]
        if lean and self.card is not None:
            outcomes.append(self._completes(told, self.card, free, f"{self.title} on {self.card}"))
            compare = compare and free.peak_allocated + found.context_bytes <= self.card.usable_bytes
        if ranges:
            outcomes += self._widen(found, free)
        if outcomes:
            found.verdict = "fits" if all(outcomes) else "unsure" if any(outcomes) else "does not fit"
            if found.verdict == "fits" and free.more.get("unseen"):
                found.verdict = "unsure"
        if compare:
            self._compare(found, free, limited)
        if found.verdict not in ("", "fits"):
            if (
                fixes
                and found.too_large_before_training is None
                and self.card is not None
                and self.batch is not None
                and (self.batch.size or 0) > 1
            ):
                self.try_batches(found, self.card, self.batch)
            if compare and advise and self.card is not None:
                with RunsAhead(functools.partial(self.attempt, found, self.card), self.jobs) as runs:
                    found.advice = advice.find(found, self.card, self.request.backend, runs)
        found.runs = self.runs
        return found

    def attempt(
        self,
        found: Estimate,
        card: Card,
        names: Collection[str],
        on_card_first: bool = False,
        record: bool = False,
    ) -> Tried | str:
        """Run the request with techniques, and an allocator among them, without a limit, and on the card unless that
        shows that it does not fit; with `on_card_first` on the card alone; with `record` its lines are known. Return
        why, if the script does not run with all of them."""
        backend = next((name for name in BACKENDS if name in names), self.request.backend)
        techniques = sorted(set(names) - {backend})
        # What hangs with a technique must not keep the answer back.
        limit = min(self.request.seconds or math.inf, max(_LEAST_SECONDS, _TIMES * found.seconds))
        request = replace(
            self._with_backend(backend, found.reserved_bytes[1]),
            techniques=techniques,
            seconds=limit,
            timed=True,
            record=record or (self.request.timed and len(names) == 1),
        )
        what = f"with {' and '.join(map(named, sorted(names)))}"
        try:
            limited, there = self._on(card, request), f"{what} on {card}"
            free = answer = self._ask(limited, there) if on_card_first else self._ask(request, what)
            if why := _not_as_wanted(free, techniques, found, on_card_first):
                raise NothingToTell(free, why)
            fits = on_card_first and self._is_sure(found, limited, answer, there)
            completed = on_card_first and answer.completed
            if (
                not on_card_first
                and free.peak_allocated + card.context_bytes * free.contexts <= card.usable_bytes
            ):
                answer = self._ask(limited, there)
                fits, completed = self._is_sure(found, limited, answer, there), answer.completed
        except (ScriptFailed, ChildFailed) as error:
            why = str(error).removeprefix(NO_RESULT)
            self.say(why if why.startswith(NOT_MET) else f"it does not run {what}: {why}")
            return str(error)
        needed = max(free.held, wanted_bytes(free)) + card.context_bytes * free.contexts
        time, unsure = seconds(free.step, card.rates), completed and not fits
        return Tried(fits, needed, time, answer if fits else free, unsure)

    def _is_sure(self, found: Estimate, request: Request, answer: Answer, what: str) -> bool:
        """Return whether a run on a card completes, also with workspaces if they make a difference."""
        if answer.completed and found.reserved_bytes[0] != found.reserved_bytes[1] and found.unknowns:
            answer = self._ask(replace(request, cudnn_workspace=CUDNN_WORKSPACE), f"{what}, with workspaces")
        return answer.completed

    def _with_backend(self, name: str, held: int, request: Request | None = None) -> Request:
        """Return the request with an allocator. The granules of memopt's pool are a share of the device, which must not
        be one without limit: it has twice what is held, and the context, or what the card has."""
        request = replace(request or self.request, backend=name)
        there = 0 if self.card is None else self.card.usable_bytes
        return replace(request, memory=max(2 * held + request.context, there)) if name == "pool" else request

    def _several(self, asked: list[tuple[Request, str]]) -> list[Answer]:
        def run(n: int) -> Answer:
            return self._ask(*asked[n])

        # Of an interrupt nobody waits: the children that the threads wait for end with the block of ScriptChildren.
        with RunsAhead(run, self.jobs) as runs:
            runs.expect(range(1, len(asked)))
            return [runs.result(n) for n in range(len(asked))]

    def _widen(self, found: Estimate, free: Answer) -> list[bool]:
        """Make the figures ranges by runs at the other end of unknown values; return whether each of the runs
        completes."""
        asked: list[tuple[Request, str]] = []
        if free.more["cudnn"] and not self.request.cudnn_workspace:
            workspace = replace(self.request, cudnn_workspace=CUDNN_WORKSPACE)
            asked.append((workspace, f"with workspaces of {_C.format_size(CUDNN_WORKSPACE)} for cuDNN"))
        answers = self._several(asked)
        if free.shape_guesses:
            few = self._few()
            asked.append(few[:2])
            answers.append(few[2])
        peaks = [(a.peak_allocated, a.held) for a in (free, *answers)]
        found.allocated_bytes = min(p[0] for p in peaks), max(p[0] for p in peaks)
        found.reserved_bytes = min(p[1] for p in peaks), max(p[1] for p in peaks)
        outcomes = []
        for (request, what), answer in zip(asked, answers, strict=True):
            more, held = answer.peak_allocated - free.peak_allocated, answer.held - free.held
            if more or held:
                found.unknowns.append(f"{what}: {_signed(more)} allocated, {_signed(held)} reserved")
            if self.card is not None:
                outcomes.append(self._completes(request, self.card, answer, f"{what}, on {self.card}"))
        return outcomes

    def _few(self) -> tuple[Request, str, Answer]:
        for fraction in _FEW:
            request = replace(self.request, fraction=fraction)
            what = f"where masks that the model computes select {fraction:.0%} and not all"
            try:
                return request, what, self._ask(request, what)
            except ScriptFailed:
                if fraction == _FEW[-1]:
                    raise
        raise AssertionError("unreachable")

    def _compare(self, found: Estimate, free: Answer, limited: Answer | None) -> None:
        others = [name for name in BACKENDS if name != self.request.backend]
        requests = [self._with_backend(name, free.held) for name in others]
        answers = self._several([(r, f"with the allocator '{r.backend}'") for r in requests])
        own = None if limited is None else limited.completed
        found.backends = [Backend(self.request.backend, free.held, own, free.peak_allocated)]
        for request, answer in zip(requests, answers, strict=True):
            completes = None
            if self.card is not None:
                what = f"with the allocator '{request.backend}' on {self.card}"
                completes = self._completes(request, self.card, answer, what)
            found.backends.append(Backend(request.backend, answer.held, completes, answer.peak_allocated))

    # ---- searches --------------------------------------------------------------------------------------------------

    def smallest_card(self, found: Estimate) -> None:
        """Fill in the least memory that a card needs for this, to within 1 % or 16 MiB, and the card that has it."""
        context = found.context_bytes // found.contexts
        low, high = found.allocated_bytes[0] + found.context_bytes, found.needed_bytes[1]
        step = max(16 << 20, high // 100)

        def suffices(memory: int) -> bool:
            card = Card(
                _C.format_size(memory),
                memory,
                self.request.compute_capability,
                self.request.multiprocessors,
                context,
            )
            return self._ask(self._on(card, self.request), f"on a card of {card.name}").completed

        needed = smallest(suffices, low - step, high, step)
        card = cards.smallest_with(needed)
        found.smallest_card = {"bytes": needed, "within": step, "card": card.name if card else None}
        found.runs = self.runs

    def try_batches(self, found: Estimate, card: Card, batch: BatchOption) -> None:
        """Fill in a batch size that fits, near the largest, if there is one."""
        try:
            # An approximate suggestion is enough here: do not spend many runs on it.
            self.largest_batch(found, card, most=(batch.size or 2) - 1, close=1 / 16)
        except (ScriptFailed, ValueError) as error:
            self.say(f"no other batch could be tried: {error}")

    def largest_batch(self, found: Estimate, card: Card, most: int = MOST_BATCH, close: float = 0.0) -> int:
        """Fill in the largest batch size that is sure to run on a card.

        Raises ValueError if the batch size changes nothing, ScriptFailed if the script fails with another one.
        """
        if self.batch is None:
            raise ValueError("no batch size was found that can be changed")
        batch, peaks = self.batch, dict[int, int]()

        def measure(size: int) -> int | None:
            request = self._on(card, batch.request(self.request, size))
            answer = self._ask(request, f"batch {size} on {card}")
            if answer.more.get("loaders_of_batch_size") == 0:
                before = "" if answer.completed else ", or runs out of memory before it makes one"
                raise ValueError(
                    f"the script makes no DataLoader{before}, so its batch size is not known: name the option that "
                    "sets it with --batch-option"
                )
            if not self._is_sure(found, request, answer, f"batch {size} on {card}"):
                return None
            peaks[size] = answer.peak_allocated
            return answer.peak_allocated

        room = card.usable_bytes - card.context_bytes * found.contexts
        start, known, allocated = min(batch.size or 1, most), {}, found.allocated_bytes[1]
        if batch.size:
            known[batch.size] = allocated
            if allocated > room:  # all that does not grow with the batch makes this too much by far
                start = max(1, batch.size * room // allocated // 2)
        try:
            best, bounded = largest(measure, room, start, most, known=known, close=close)
        except NoEffect:
            raise ValueError(
                f"{batch} does not change what the script needs: name the option that does with --batch-option"
            ) from None
        found.largest_batch = {
            "size": best,
            "peak": peaks.get(best),
            "option": str(batch),
            "card": card.name,
            "bounded": bounded,
            "exact": not close,
            "now": batch.size,
        }
        found.runs = self.runs
        return best


def wanted_bytes(answer: Answer) -> int:
    """Return the peak; where a run ran out of memory, with what it asked for then."""
    oom = answer.oom or {}
    return max(answer.peak_allocated, (oom.get("allocated") or 0) + (oom.get("asked") or 0))


def _not_as_wanted(answer: Answer, techniques: list[str], found: Estimate, limited: bool) -> str:
    """Return the reason why an answer does not describe the training with these techniques, "" if it does."""
    without = [name for name in map(plain, techniques) if name not in answer.more["techniques"]]
    if answer.oom is not None:
        return "" if limited else f"it requests more than {_C.format_size(cards.NO_LIMIT)}"
    if answer.steps < found.steps:
        return f"only {answer.steps} steps were done in its time"
    refused = answer.more.get("refused") or {}
    if why := "; ".join(refused[name] for name in without if name in refused):
        return why
    return f"{NOT_MET} {' and '.join(without)}" if without else ""


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{_C.format_size(abs(size))}"


def _not_described(answer: Answer, steps: int | None) -> str:
    """Return the reason why an answer does not describe training, "" if it does."""
    if answer.oom is not None:
        return ""
    ended = "it ended" if answer.stopped in ("end", "exit") else "it was stopped"
    if not answer.held:
        return f"{ended} before it allocated any memory on the card"
    if not answer.more.get("trained", True) and steps != 0:
        return (
            f"{ended} without a training step: no optimizer stepped and no backward pass ran. For a script that only "
            "evaluates or generates, use --steps 0"
        )
    return ""


def _asked_with_less_shortened(run: Callable[[Request], Answer], request: Request) -> tuple[Answer, str]:
    """The answer to a request, and to how much of `shorten` it is. A script that fails once its loops were shortened
    is run again with less of that: its evaluations whole, and then as far as its steps alone."""
    answer = run(request)
    first, how = answer, request.shorten
    for shorten in SHORTEN[SHORTEN.index(request.shorten) + 1 :]:
        shortened = answer.more.get("shortened")
        if not answer.failed or not shortened or (shorten == "training" and "batches" not in shortened):
            continue
        answer, how = run(replace(request, shorten=shorten)), shorten
        if shorten == "none" and not answer.failed:
            answer.covered = [
                *answer.covered,
                f"with shortened loops it failed: {first.error or 'it exited'}",
            ]
            answer.more["unseen"] = True
    return (first, request.shorten) if answer.failed else (answer, how)


# ---- searches with few runs ------------------------------------------------------------------------------------------


class NoEffect(ValueError):
    """Raised if twice the size takes not a byte more: the searched option does not change the need."""


def smallest(suffices: Callable[[int], bool], low: int, high: int, step: int) -> int:
    """The least number above `low` that suffices, to within `step`, by bisection; `high` is known to."""
    while high - low > step:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def largest(
    measure: Callable[[int], int | None],
    room: int,
    start: int,
    most: int,
    *,
    known: dict[int, int] | None = None,
    close: float = 0.0,
) -> tuple[int, bool]:
    """Return the largest n, at most `most`, for which measure(n) is a number of bytes, and whether it is a bound.

    measure(n) is None if n does not fit; the result is 0 if not even 1 does. It is a bound if n + 1 does not fit or
    `most` is reached; it is none if larger n take no more bytes. `known`: bytes of some n that were measured without a
    limit. With `close` the result may be too small by that fraction of itself.

    Bytes are assumed to grow linearly, and the n at which that line meets `room` is tried next. Steps that double and
    halve do the rest, so the result is exact (n fits, n + 1 does not) however the bytes grow.
    """
    fits: dict[int, int] = {}
    points = dict(known or {})
    low, high = 0, most + 1
    probe, step, guessed = min(start, most), 1, False
    while high - low > max(1, close * low):
        size, before = measure(probe), high - low
        if size is None:
            high = probe
            room -= room // 20  # an allocator needs room beside what it hands out: the line is met too late
        else:
            flat = low > 0 and probe >= 2 * low and size <= fits[low]
            if flat and len(fits) == 1:
                raise NoEffect
            low, fits[probe] = probe, size
            points[probe] = size
            if flat:
                return low, False
        met = _meets(points, room)
        # One guess that brings little is followed by what halves for sure.
        guessed = met is not None and not (guessed and high <= most and 2 * (high - low) > before)
        if guessed and met is not None and met > low:
            # A line that is wrong must not ask for the moon: each run's data are made on this host.
            probe = min(met, high - 1, 8 * low)
        elif guessed:
            probe = min(low + step, (low + high) // 2)
            step *= 2
        elif not low and len(points) < 2 and high > 2:
            probe = 1  # either the answer is 0, or a line has its other point
        else:
            probe = (low + high) // 2 if high <= most else min(2 * low, most)
    return low, True


def _meets(points: dict[int, int], room: int) -> int | None:
    """Return the batch size at which the line through the two points nearest to `room` meets it, None without one."""
    if len(points) < 2:
        return None
    first, last = sorted(sorted(points, key=lambda n: abs(points[n] - room))[:2])
    slope = points[last] - points[first]
    return first + (room - points[first]) * (last - first) // slope if slope > 0 else None
