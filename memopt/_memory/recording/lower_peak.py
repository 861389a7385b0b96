"""Changes that would lower the peak of a recording, each with the bytes that it saves, its cost and the line to write.

What is told of optimizers is the arithmetic by which `memopt estimate` plans (_estimate/forecast.py), on the moments of
this recording. What recomputing or offloading activations saves can be told by a run only, so it is not told here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from memopt import _C
from memopt._memory.recording import inplace_advice
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recording import Recording
from memopt._run.plan import EIGHT_BITS, FUSED, HAVE_FUSED, OFFLOAD_GRADIENTS, OFFLOAD_STATES

WORKED_OUT = "Each change alone, worked out from this recording."
TRIED = "Each was tried on the recorded requests, which fit then."
_LEAST = 0.01  # of the peak: a change that saves less is not worth a line
_MOST = 8  # changes that are told
_LARGE = 1 / 3  # of the peak: activations that are worth a word


@dataclass(frozen=True)
class Suggestion:
    """A change that lowers the peak. saves: bytes, 0 where only `peak`, the bytes of tensors then, is known. cost: how
    results differ, and what a step does more; where: a line of the program; paste: the line to write."""

    change: str
    peak: int
    saves: int = 0
    cost: str = "none"
    where: str = ""
    paste: str = ""

    def as_dict(self) -> dict[str, Any]:
        told = {"change": self.change, "peak_bytes": self.peak, "saves_bytes": self.saves}
        return told | {"cost": self.cost, "where": self.where, "paste": self.paste}

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        line = f": {self.paste}" if self.paste else ""
        cost = "" if self.cost == "none" else f"; {self.cost}"
        return f"{self.change}{place} saves {_C.format_size(self.saves)}{cost}{line}"


def find(recording: Recording, leaks: Sequence[Leak] = ()) -> list[Suggestion]:
    """Return changes that would lower a recording's peak, largest savings first. leaks: of leaks.find()."""
    peak, _ = recording.peak()
    found = [
        *_of_lines(recording, leaks, peak),
        *_of_gradients(recording, peak),
        *_of_optimizers(recording, peak),
    ]
    worth = [one for one in found if one.saves >= _LEAST * peak]
    return sorted(worth, key=lambda one: -one.saves)[:_MOST]


def untried(recording: Recording) -> str:
    """Return a sentence of HTML on activations, where they are much of a CUDA device's peak, else ""."""
    peak, _ = recording.peak()
    activations = recording.by_category()["activations"]
    command = recording.facts.get("command")
    if not recording.device.startswith("cuda") or activations < _LARGE * peak or "plan" in recording.facts:
        return ""
    if not isinstance(command, list) or not command or not str(command[0]).endswith(".py"):
        return ""
    card = _C.format_size(recording.capacity).replace(" ", "") if recording.capacity else "24GiB"
    line = f"python -m memopt fit --gpu {card} {shlex.join(map(str, command))}"
    return (
        f"Activations are {_C.format_size(activations)} of it. To find out how much of that "
        "<code>memopt.auto_checkpoint</code> and <code>memopt.offload_activations</code> save, and what a step takes "
        f'then, run the script on a simulated card: <span class="code">{escape(line)}</span>'
    )


def _of_lines(recording: Recording, leaks: Sequence[Leak], peak: int) -> Iterator[Suggestion]:
    for one in inplace_advice.find(recording):
        yield Suggestion("work in place", peak - one.saves, one.saves, where=one.line, paste=one.instead)
    for leak in leaks:
        if leak.saves:
            name = leak.holder or leak.text.partition("=")[0].strip()
            yield Suggestion(
                "free at the end of its step, if nothing needs it later",
                peak - leak.saves,
                leak.saves,
                where=leak.line,
                paste=f"del {name}" if name.isidentifier() else "",
            )


def _of_gradients(recording: Recording, peak: int) -> Iterator[Suggestion]:
    from memopt._memory.oom.known_run import NEVER, BlockTable
    from memopt._memory.oom.trials import ZERO_GRAD, gradients_of_earlier_steps

    born, died, size, stream, category = (
        recording.columns[name] for name in ("born", "died", "size", "stream", "category")
    )
    steps = torch.tensor([mark.event for mark in recording.marks if mark.kind == "step"], dtype=torch.int64)
    ends = torch.where(died == recording.events, NEVER, died)
    blocks = BlockTable(born, ends, size, stream, category, torch.ones_like(size, dtype=torch.bool))
    late = gradients_of_earlier_steps(blocks, steps).nonzero().flatten()
    saves = (
        inplace_advice.lowered(recording, late, steps[torch.searchsorted(steps, born[late])] + 1)
        if len(late)
        else 0
    )
    yield Suggestion("free gradients where they are no longer needed", peak - saves, saves, paste=ZERO_GRAD)


def _of_optimizers(recording: Recording, peak: int) -> Iterator[Suggestion]:
    kinds = _kinds(recording)
    if not kinds:
        return
    from memopt._estimate import advice, cards, moments
    from memopt._estimate.forecast import PARTS, Forecast

    forecast = Forecast(moments.of(recording), [], cards.card("24GiB").rates, beside=0, held=1.0)
    states_part = PARTS.index("states")
    states = max((moment[states_part] for moment in forecast.moments), default=0)
    size = _C.format_size(states)
    changes = {
        FUSED: ("the optimizer's step without temporaries", ""),
        EIGHT_BITS: ("optimizer states of 8 bits", ""),
        OFFLOAD_STATES: ("optimizer states on the host", f"each step copies {size} there and back"),
        OFFLOAD_GRADIENTS: ("gradients on the host", "each step copies them there and back"),
    }
    for name, (change, copies) in changes.items():
        if name not in kinds:
            continue
        most = forecast.needed([name])
        results = advice.CHANGES[name]
        cost = "; ".join(
            filter(None, (f"results: {results}" if results.startswith("the") else results, copies))
        )
        paste = " and ".join(advice.in_words([name], {name: kinds[name]}))
        yield Suggestion(change, most, peak - most, cost, paste=paste)


def _kinds(recording: Recording) -> dict[str, list[str]]:
    """Return the techniques that all optimizers of the run could have, each with the optimizers' names."""
    told: Any = recording.facts.get("optimizers")
    if not isinstance(told, list) or not told or not all(isinstance(one, dict) for one in told):
        return {}
    kinds = [str(one.get("kind")) for one in told]
    options = {option for one in told for option in one.get("options", ())}
    found = {}
    if {*kinds} <= {*HAVE_FUSED} and not options & {"fused", "foreach", "differentiable"}:
        found[FUSED] = kinds
    if {*kinds} <= {"Adam", "AdamW"} and "amsgrad" not in options:
        found[EIGHT_BITS] = kinds
    if recording.device.startswith("cuda") and {*kinds} <= {"Adam", "AdamW", "SGD"}:
        found[OFFLOAD_STATES] = found[OFFLOAD_GRADIENTS] = kinds
    return found
