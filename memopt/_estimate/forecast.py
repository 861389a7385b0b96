"""A forecast of what techniques save and cost, worked out from runs without them.

What happens to an optimizer's states and gradients is arithmetic on the fullest moments of the script's own run and on
its step: states of 8 bits are a quarter, offloaded ones are none, one pass has no temporaries. What activations become
is not: such techniques are run by themselves, and of theirs the moments are known. Before that the most that they could
save is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memopt._estimate.cards import Rates
from memopt._estimate.step_time import Segment, seconds
from memopt._run.plan import (
    CHECKPOINT,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    FUSED,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
    OPTIONS,
    STATES_ON_DISK,
    STEP_IN_BACKWARD,
    TILES,
    plain,
)

PARTS = ("parameters", "gradients", "states", "temporaries", "activations", "other")
_PARAMETERS, _GRADIENTS, _STATES, _TEMPORARIES, _ACTIVATIONS, _ = range(len(PARTS))
Moment = list[int]  # bytes by PARTS

_SHARE = {EIGHT_BITS: 1 / 4, FOUR_BITS: 1 / 8, FACTORED: 1 / 2}  # of states of 32 bits
WORKED_OUT = {FUSED, *_SHARE, OFFLOAD_STATES, STATES_ON_DISK, OFFLOAD_GRADIENTS, "expandable", "pool"}
_AGAIN = 0.02  # of a step: what MLPs take at least that run again in the backward pass
_SPARE = 1.01  # of what is worked out: turns, codes' scales, and the allocator's blocks


def share_of_states(names: Iterable[str]) -> float:
    """Return what states take with techniques, wherever they are, of what they take with 32 bits."""
    return math.prod(_SHARE.get(name, 1.0) for name in names)


@dataclass(frozen=True)
class Known:
    """A run: its moments, and a step's seconds, infinite where they are not known."""

    moments: list[Moment]
    seconds: float


@dataclass
class Forecast:
    """A forecast from the script's own run.

    Attributes:
        moments: Its moments.
        step: One step of it.
        rates: The card's.
        beside: Bytes that the card must have beside tensors.
        held: The allocator's memory at the peak, as a multiple of the tensors'.
        alone: Runs with one technique, by its name.
        host_memory: Bytes of the host's memory that techniques may take.
    """

    moments: list[Moment]
    step: list[Segment]
    rates: Rates
    beside: int
    held: float
    alone: dict[str, Known] = field(default_factory=dict)
    host_memory: float = math.inf

    def least(self, names: Iterable[str]) -> int:
        """Return bytes of a card that these techniques need at least, whatever they do to activations."""
        names = set(map(plain, names))
        share = _shares(names)
        if names - WORKED_OUT:
            share[_ACTIVATIONS] = 0.0
        if OFFLOAD_LAYERS in names:
            share[_PARAMETERS] = share[_GRADIENTS] = share[_STATES] = 0.0
        return _peak(self.moments, share) + self.beside

    def needed(self, names: Iterable[str]) -> int:
        """Return bytes of a card that these techniques are likely to need: what those that were run save is added up,
        which is the most that they save together."""
        names = {*names}
        runs, share = {name for name in names if plain(name) not in WORKED_OUT}, _shares(names)
        if not runs <= self.alone.keys():
            return self.least(names)
        without = _peak(self.moments, share)
        peaks = [_peak(self.alone[name].moments, share) for name in runs]
        together = without - sum(without - peak for peak in peaks)
        return max(int(_SPARE * together) + self.beside, self.least(names))

    def host(self, names: Iterable[str]) -> int:
        """Return bytes of the host's memory that these techniques need at least, for what they put there."""
        names = set(map(plain, names))
        goes = {
            _PARAMETERS: OFFLOAD_LAYERS in names,
            _GRADIENTS: bool(names & {OFFLOAD_LAYERS, OFFLOAD_GRADIENTS}),
            _STATES: bool(names & {OFFLOAD_LAYERS, OFFLOAD_STATES}) and STATES_ON_DISK not in names,
        }
        share = {_STATES: share_of_states(names)}
        return sum(
            int(share.get(part, 1.0) * max(moment[part] for moment in self.moments))
            for part, there in goes.items()
            if there
        )

    def is_tight(self, names: Iterable[str], room: int) -> bool:
        """Return whether it hangs on how little the allocator holds beside tensors."""
        return not {*names} & {"expandable", "pool"} and (self.needed(names) - self.beside) * self.held > room

    def seconds(self, names: Iterable[str]) -> float:
        """Return the seconds of a step; of a technique that was not run yet, the least that it can take."""
        without = seconds(self.step, self.rates)
        names = {*names}
        runs = (known.seconds - without for name in names if (known := self._known(name)) is not None)
        again = _AGAIN * without if TILES in names - self.alone.keys() else 0.0
        return seconds(self._step_with(names), self.rates) + sum(runs) + again

    def _known(self, name: str) -> Known | None:
        """Return the run with a technique; of a checkpoint with a budget that was not run, with a larger one."""
        if name in self.alone or not name.startswith(CHECKPOINT):
            return self.alone.get(name)
        return next((run for other, run in self.alone.items() if other.startswith(CHECKPOINT)), None)

    def _step_with(self, names: set[str]) -> list[Segment]:
        """Return the step with one pass over parameters, gradients and states in the place of the optimizer's
        operators, which are those after the last backward pass, and the copies of what lies on the host or a disk."""
        names = {plain(name) for name in names - self.alone.keys()}
        options = names & OPTIONS.keys()
        if not options and FUSED not in names:
            return self.step
        *before, last = self.step
        gradients, states = (max(moment[part] for moment in self.moments) for part in (_GRADIENTS, _STATES))
        share = share_of_states(names)
        moved = int((4 if FUSED in names else 3) * gradients + 2 * share * states)
        last = replace(last, operators=[], kernel_bytes=last.kernel_bytes + moved)
        if names & {OFFLOAD_STATES, STATES_ON_DISK}:
            last = _copied(last, int(share * states), int(share * states))
        if STATES_ON_DISK in names:
            last = replace(last, disk_bytes=last.disk_bytes + int(2 * share * states))
        if OFFLOAD_GRADIENTS in names and before:
            before[-1] = _copied(before[-1], 0, gradients)
            last = _copied(last, gradients, 0)
        return [*before, last]


def _copied(segment: Segment, to_device: int, to_host: int) -> Segment:
    return replace(
        segment,
        to_device=segment.to_device + to_device,
        to_host=segment.to_host + to_host,
        side_to_device=segment.side_to_device + to_device,
        side_to_host=segment.side_to_host + to_host,
    )


def _shares(names: set[str]) -> list[float]:
    """Return what is left of each part."""
    names = set(map(plain, names))
    left = [1.0] * len(PARTS)
    if names & {FUSED, *OPTIONS}:
        left[_TEMPORARIES] = 0.0
    if names & {OFFLOAD_GRADIENTS, STEP_IN_BACKWARD}:
        left[_GRADIENTS] = 0.0
    left[_STATES] = 0.0 if names & {OFFLOAD_STATES, STATES_ON_DISK} else share_of_states(names)
    return left


def _peak(moments: Iterable[Moment], left: list[float]) -> int:
    return max(int(sum(size * share for size, share in zip(moment, left, strict=True))) for moment in moments)
