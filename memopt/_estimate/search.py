"""The search for techniques with which a script fits its card: the lowest tier of exactness, and in it the fastest.

With a forecast (forecast.py) the fastest combinations that it lets fit are run, and alone only those techniques that
nothing is worked out of, when such a combination has them. Tiers in which nothing can fit are passed over; where that
is all of them, as of a script that runs out while it makes its model, each technique is run alone, and of those that
save anything the combinations that save most.

Where that finds nothing, or without a forecast, each technique is run alone. What a combination takes is predicted by
adding up what each saves; the fastest that are predicted to fit are run. Where that misleads, as one phase of a step
hides what is saved in another, the largest combinations are run: if none of a tier fits, the tier has nothing. Of what
fits, each part is left out that can be, unless it saves time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from memopt._estimate.answer import Answer
from memopt._estimate.forecast import WORKED_OUT, Forecast, Known
from memopt._estimate.runs_ahead import RunsAhead
from memopt._run.plan import (
    BF16,
    CHECKPOINT,
    CODED_ACTIVATIONS,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    FUSED,
    LEAST_BUDGET,
    LOSS_HEAD,
    MICRO_BATCHES,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
    OPTIONS,
    SAVED_ELSEWHERE,
    STATES_ON_DISK,
    STEP_IN_BACKWARD,
    TILES,
    plain,
)

TIERS = ("free", "bit-equal", "equal to rounding", "other numbers")
FREE, BIT_EQUAL, ROUNDING, OTHER = range(4)
_TIER = {
    "expandable": FREE,
    "pool": FREE,
    CHECKPOINT: BIT_EQUAL,
    OFFLOAD_ACTIVATIONS: BIT_EQUAL,
    OFFLOAD_LAYERS: ROUNDING,  # its optimizer steps on the host
    FUSED: ROUNDING,
    LOSS_HEAD: ROUNDING,
    TILES: ROUNDING,
    MICRO_BATCHES: ROUNDING,
    OFFLOAD_GRADIENTS: ROUNDING,  # these are with memopt's optimizers in the place of torch's
    OFFLOAD_STATES: ROUNDING,
    STATES_ON_DISK: ROUNDING,
    STEP_IN_BACKWARD: ROUNDING,
    EIGHT_BITS: OTHER,
    FOUR_BITS: OTHER,
    FACTORED: OTHER,
    CODED_ACTIVATIONS: OTHER,
    BF16: OTHER,
}
_APART = [  # of each at most one
    {EIGHT_BITS, FOUR_BITS},
    {MICRO_BATCHES, STEP_IN_BACKWARD},
    {OFFLOAD_GRADIENTS, STEP_IN_BACKWARD},
    {OFFLOAD_STATES, STATES_ON_DISK},
    {STATES_ON_DISK, STEP_IN_BACKWARD},
    {CHECKPOINT, *SAVED_ELSEWHERE},
    {"expandable", "pool"},
    *({FUSED, option} for option in OPTIONS),
]
_ALLOCATORS = {"expandable", "pool"}
_SURE = 0.98  # of what is worked out: some blocks are taken for another category's
_BUDGETS = (0.99, 0.975, 0.96)  # of the room, before it is halved what lies below
_CLOSE = 0.03  # of the room: less is not worth a run
_HALVED, _KEPT = 2, 4  # runs
PAGES = 2 * (20 << 20)  # bytes: by 20 MiB torch's segments grow, so that what is left of a few is in pieces
ALIKE = 1.02  # a plan with fewer techniques is taken, if it takes no more than so much of another's time
_LIKELY = 3  # combinations of a tier that are run because they are predicted to fit

Names = frozenset[str]


class Tried(NamedTuple):
    """A run with techniques. needed: bytes of a card for all of it, without a limit; seconds: of a step, as predicted,
    0 where that is not known; unsure: it fits, but not with workspaces for cuDNN."""

    fits: bool
    needed: int
    seconds: float = 0.0
    answer: Answer | None = None
    unsure: bool = False


def tier_of(names: Iterable[str]) -> int:
    """Return the tier of techniques together, by their names with or without what follows them."""
    return max((_TIER[plain(name)] for name in names), default=FREE)


class Search:
    """A search among techniques.

    Args:
        techniques: Their names, CHECKPOINT's with its budget, STATES_ON_DISK's with its directory.
        needed: Bytes of a card that the script needs without any.
        room: Bytes of the card.
        runs: Of the script with techniques; why, where it does not run with all of them.
        seconds: Of a step without any.
        forecast: Of what techniques save and cost.

    Attributes:
        tried: What was asked for, and ran.
        failed: What was asked for and did not run, and why.
        alone: What ran with one technique.
    """

    def __init__(
        self,
        techniques: Iterable[str],
        needed: int,
        room: int,
        runs: RunsAhead[Names, Tried | str],
        seconds: float = 0.0,
        forecast: Forecast | None = None,
    ) -> None:
        self.techniques = list(techniques)
        self._needed, self._room, self._plain_seconds = needed, room, seconds
        self._runs = runs
        self.tried: dict[Names, Tried] = {}
        self.failed: dict[Names, str] = {}
        self.alone: dict[str, Tried] = {}
        self.forecast = forecast

    def run(self, names: Names) -> Tried | None:
        """Return the run with techniques; None where it does not run with all of them."""
        result = self._runs.result(names)
        if isinstance(result, str):
            self.failed[names] = result
            return None
        return self.tried.setdefault(names, result)

    def try_alone(self, tier: int) -> None:
        """Run each technique of a tier by itself; 4 bits where 8 are not enough."""
        of_tier = [name for name in self.techniques if tier_of([name]) == tier]
        for n, name in enumerate(of_tier):
            self._runs.expect(Names([other]) for other in of_tier[n + 1 :] if other != FOUR_BITS)
            if name == FOUR_BITS and EIGHT_BITS in self.alone and self.alone[EIGHT_BITS].fits:
                continue
            if (tried := self.run(Names([name]))) is not None:
                self.alone[name] = tried

    def found(self) -> Iterator[Names]:
        """Yield combinations that fit: one of each tier that has any, the lowest tier first."""
        possible = {tier_of(names) for names in combinations(self.techniques) if self.could_fit(names)}
        if not possible and not self._may_fit():
            return
        for tier in sorted(possible or range(len(TIERS))):
            fitting = next((names for names in self._candidates(tier) if self._fits(names)), None)
            if fitting is None:
                continue
            yield self._without_needless(fitting)

    def with_more_room(self, names: Names, room: int, *, native: bool) -> Names:
        """Return techniques that fit with what they have for activations made larger, if they are faster then: the
        budget of CHECKPOINT, or what those of SAVED_ELSEWHERE leave as it is; with expandable segments, if they fit
        with these.

        Fixed segments may have no place for the blocks of a plan that leaves little; nor for those of a checkpoint,
        which is planned anew where the script runs, by the times measured there.

        Args:
            names: The techniques.
            room: Bytes of the card for tensors.
            native: Whether the allocator is torch's own, if none is among the names.
        """
        first = self.run(names)
        own = next((name for name in names if name.startswith((CHECKPOINT, *SAVED_ELSEWHERE))), None)
        if own is None or first is None:
            return names
        others = names - {own}
        if native and not others & _ALLOCATORS:
            others |= {"expandable"}
        room -= PAGES
        best, fastest = names, first.seconds

        def sized(size: int) -> Names:
            return others | {f"{own.partition(':')[0]}:{size >> 20 << 20}"}

        def fitting(size: int) -> Tried | None:
            nonlocal best, fastest
            tried = self.run(sized(size))
            if tried is None or not tried.fits:
                return None
            if tried.seconds < fastest or not tried.seconds:  # unknown
                best, fastest = sized(size), tried.seconds
            return tried

        slower = not 0 < first.seconds <= self._plain_seconds
        is_budget = own.startswith(CHECKPOINT)
        self._runs.expect(sized(int(share * room)) for share in _BUDGETS if slower and is_budget)
        if is_budget and self._fits(others | {own}):
            best = others | {own}
        if slower and is_budget:
            _with_budgets(_budget_of(own, first), room, fitting)
        elif slower:
            _with_more_kept(first, room, fitting)
        return best

    def could_fit(self, names: Names) -> bool:
        """Return whether no forecast says that techniques cannot fit, or take too much of the host's memory."""
        forecast = self.forecast
        return forecast is None or (
            _SURE * forecast.least(names) <= self._room
            and _SURE * forecast.host(names) <= forecast.host_memory
        )

    def _could(self, names: Names) -> bool:
        return bool(names) and self.could_fit(names)

    def _may_fit(self) -> bool:
        """Return whether the forecast, by which nothing can fit, is wrong, or nobody knows: of the techniques that run
        and save anything alone, the combinations that save most are run."""
        for tier in range(len(TIERS)):
            self.try_alone(tier)
        saving = [name for name, tried in self.alone.items() if tried.fits or tried.needed < self._needed]
        possible = [*combinations(saving)]
        largest = [names for names in possible if not any(names < others for others in possible)]
        first = sorted(largest, key=self._predicted)[:_LIKELY]
        self._runs.expect(first[1:])
        most = [self.run(names) for names in first]
        ran = [tried for tried in most if tried is not None]
        return any(tried.fits for tried in (*ran, *self.alone.values())) or bool(most and not ran)

    def _fits(self, names: Names) -> bool:
        tried = self.run(names)
        return tried is not None and tried.fits

    def _without_needless(self, fitting: Names) -> Names:
        """Return techniques that fit without those that are not needed and save no time."""
        parts = sorted(fitting, key=self._worth, reverse=True)
        while parts:
            before, faster = fitting, []
            for n, name in enumerate(parts):
                self._runs.expect(filter(self._could, (fitting - {other} for other in parts[n + 1 :])))
                rest = fitting - {name}
                if not (self._could(rest) and self._fits(rest)):
                    continue
                if self._is_slower(rest, fitting):
                    faster.append(name)
                else:
                    fitting = rest
            parts = faster if fitting != before else []
        return fitting

    def _is_slower(self, names: Names, others: Names) -> bool:
        seconds = self.tried[others].seconds
        return 0 < ALIKE * seconds < _seconds_of(self.tried[names])

    def _candidates(self, tier: int) -> Iterator[Names]:
        if self.forecast is not None:
            yield from self._forecast(tier, self.forecast)
        for lower in range(tier + 1):  # of a tier that was passed over, too
            self.try_alone(lower)
        possible = [names for names in combinations(self.alone) if tier_of(names) == tier]
        likely = [names for names in possible if self._predicted(names) <= self._room or self._known(names)]
        yield from self._in_turn(
            sorted(likely, key=lambda names: (self._seconds(names), len(names)))[:_LIKELY]
        )
        largest = [names for names in possible if not any(names < others for others in possible)]
        for names in self._in_turn(sorted(largest, key=self._predicted)):
            yield names
            if len(names) > 1 and self.run(names) is None:  # two of them do not run together
                yield from (names - {name} for name in names)

    def _in_turn(self, several: list[Names]) -> Iterator[Names]:
        for n, names in enumerate(several):
            self._runs.expect(several[n + 1 : n + _LIKELY])
            yield names

    def _forecast(self, tier: int, forecast: Forecast) -> Iterator[Names]:
        """Yield the fastest combinations that are forecast to fit, as far as known: what they have that nothing is
        worked out of is run alone first. Layers on the host are in none, and run where nothing else fits."""

        def unknown(names: Names) -> list[str]:
            return sorted(
                name for name in names if plain(name) not in WORKED_OUT and name not in forecast.alone
            )

        def order(names: Names) -> tuple[bool, float, int, bool, int]:
            time = round(forecast.seconds(names), 4)
            return (
                FOUR_BITS in names,
                time,
                len(unknown(names)),
                forecast.is_tight(names, self._room),
                len(names),
            )

        techniques = [name for name in self.techniques if name != OFFLOAD_LAYERS]
        left = [
            names for names in combinations(techniques) if tier_of(names) == tier and self.could_fit(names)
        ]
        tries = 0
        while tries < _LIKELY:
            likely = (names for names in left if forecast.needed(names) <= self._room)
            ranked = sorted(likely, key=order)
            if not ranked:
                return
            best = ranked[0]
            alone = unknown(best)[:1]
            then = [best - {name} for name in best] if not alone else []
            for names in ranked:
                then += [Names([name]) for name in unknown(names)] or [names]
            self._runs.expect(filter(self._could, then), beside=Names(alone) or best)
            if not alone:
                tries += 1
                yield best
                left = [
                    names for names in left if names not in (best, best - _ALLOCATORS)
                ]  # it holds no less
                if self.run(best) is None:
                    alone = [name for name in best if name not in self.alone]
            for name in alone:
                tried = self.run(Names([name]))
                if tried is None:
                    left = [names for names in left if name not in names]
                    continue
                self.alone[name] = tried
                if plain(name) not in WORKED_OUT and tried.answer is not None:
                    forecast.alone[name] = Known(tried.answer.more["moments"], _seconds_of(tried))
                    if name.startswith(CHECKPOINT) and LEAST_BUDGET in tried.answer.more.get(
                        "techniques", {}
                    ):
                        # Of another budget it would be the same.
                        left = [names for names in left if name in names or not _has(CHECKPOINT, names)]

    def _known(self, names: Names) -> bool:
        return len(names) == 1 and self._fits(names)

    def _predicted(self, names: Names) -> int:
        return self._needed - sum(self._needed - self.alone[name].needed for name in names)

    def _seconds(self, names: Names) -> float:
        plain = self._plain_seconds
        return plain + sum(_seconds_of(self.alone[name]) - plain for name in names)

    def _worth(self, name: str) -> tuple[int, float, int]:
        """Order what to do without: changed numbers, then time, then what saves least."""
        if self.forecast is not None:
            return tier_of([name]), self.forecast.seconds([name]), self.forecast.needed([name])
        tried = self.alone[name]
        return tier_of([name]), _seconds_of(tried), tried.needed


def _seconds_of(tried: Tried) -> float:
    """Return a step's seconds; what is not known, as of a script each of whose steps makes a plan, comes last."""
    return tried.seconds or math.inf


def _has(technique: str, names: Names) -> bool:
    return any(name.startswith(technique) for name in names)


def _budget_of(checkpoint: str, tried: Tried) -> int:
    met = tried.answer.more.get("techniques", {}) if tried.answer is not None else {}
    return int(met.get(LEAST_BUDGET, [checkpoint.partition(":")[2]])[0])


def _with_budgets(low: int, room: int, fitting: Callable[[int], Tried | None]) -> None:
    """Try budgets of a checkpoint that are larger than `low`."""
    high = room
    for share in _BUDGETS:
        budget = int(share * room)
        if high - low < _CLOSE * room or fitting(budget) is not None:
            return
        high = budget
    for _ in range(_HALVED):
        if high - low < _CLOSE * room:
            return
        budget = (low + high) // 2
        low, high = (low, budget) if fitting(budget) is None else (budget, high)


def _with_more_kept(first: Tried, room: int, fitting: Callable[[int], Tried | None]) -> None:
    """Try to keep more on the device beside what is offloaded: the peak grows by as much, once it is there."""
    most, kept, too_much = first, 0, 2 * room
    for _ in range(_KEPT):
        peak = 0 if most.answer is None else most.answer.peak_allocated
        more = min(int(_BUDGETS[0] * room) - peak, (too_much - kept) // 2)
        if more < _CLOSE * room:
            return
        tried = fitting(kept + more)
        if tried is None:
            too_much = kept + more
        else:
            most, kept = tried, kept + more


def combinations(techniques: Iterable[str]) -> Iterator[Names]:
    """Yield what of these techniques goes together, one technique or more."""
    named = list(techniques)
    for count in range(1, len(named) + 1):
        for names in itertools.combinations(named, count):
            kinds = {plain(name) for name in names}
            if len(kinds) == count and all(len(kinds & apart) < 2 for apart in _APART):
                yield Names(names)
