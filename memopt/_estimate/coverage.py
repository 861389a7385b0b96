"""The part of a script that an estimate has covered, and further runs where shortening the script went too far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._estimate.answer import Answer
from memopt._estimate.request import SHORTEN, Request

if TYPE_CHECKING:
    from memopt._estimate.loader_passes import LoaderPasses
    from memopt._estimate.loops import Loops
    from memopt._estimate.script import End

_PLACES = 4
_HOW = {"steps": "after its steps", "batches": "to its last batch"}


def told(end: End, loops: Loops, passes: LoaderPasses) -> dict[str, Any]:
    """Return what was covered, for the child's answer."""
    count, what = (
        (loops.done, "step") if loops.done or not loops.backwards else (loops.backwards, "backward pass")
    )
    plural = "" if count == 1 else "es" if what.endswith("s") else "s"
    covered = [
        _covered(end, f"{count} {what}{plural}", loops),
        _early(loops),
        _growing(loops),
        *passes.kept.values(),
        *passes.read.values(),
    ]
    return {"covered": [line for line in covered if line], **so_far(loops)}


def so_far(loops: Loops) -> dict[str, Any]:
    return {
        "trained": loops.trained,
        "shortened": sorted(set(loops.short.values())),
    }


def _covered(end: End, steps: str, loops: Loops) -> str:
    if end.stopped == "steps":
        return f"{steps}, then it was ended{_at(end)}: what comes after was not seen"
    if end.stopped == "seconds":
        return f"{steps}, then it was stopped by its time limit{_at(end)}: what comes after was not seen"
    if end.stopped == "error":
        return f"{steps} before it ran out of memory" if end.out_of_memory else ""
    if not loops.short:
        return f"{steps}: the whole script"
    places = [f"{Path(where).name} {_HOW.get(how, f'after {how}')}" for where, how in loops.short.items()]
    more = f", {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return f"{steps}, then shortened loops ({', '.join(places[:_PLACES])}{more}): the script ran to its end"


def _early(loops: Loops) -> str:
    turns = [f"{Path(where).name} (every {every})" for where, every in loops.early.items()]
    return f"once before its turn, in the last iteration: {', '.join(turns)}" if turns else ""


def _growing(loops: Loops) -> str:
    kept = [f"{Path(where).name} {_C.format_size(size)}" for where, size in loops.grows.items()]
    return (
        f"more is kept with each iteration, not counted beyond those that ran: {', '.join(kept)}"
        if kept
        else ""
    )


def _at(end: End) -> str:
    return f" at {end.where}" if end.where else ""


def nothing(answer: Answer, steps: int | None) -> str:
    """Return the reason why an answer does not describe training, "" if it does."""
    if answer.oom is not None:
        return ""
    ended = "it ended" if answer.stopped in ("end", "exit") else "it was stopped"
    if not answer.held:
        return f"{ended} before it took any memory of the card"
    if not answer.more.get("trained", True) and steps != 0:
        return (
            f"{ended} without a training step: no optimizer has stepped and there was no backward pass. Of a script "
            "that only evaluates or generates --steps 0 tells what it takes"
        )
    return ""


def ask(run: Callable[[Request], Answer], request: Request) -> tuple[Answer, str]:
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
