"""The fullest moments of a recorded run, for each set of its parts that techniques might take away."""

from __future__ import annotations

import itertools

import torch

from memopt._estimate.forecast import PARTS
from memopt._memory.recording.recording import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, Recording
from memopt._run.plan import PLANNED, PLANNING


def of(recording: Recording) -> list[list[int]]:
    """Return rows of bytes by PARTS: whichever parts are left out, the moment that is the fullest then is among them.

    What an optimizer makes and drops within one step is a temporary of it, the rest its state. Moments of trial steps,
    by which a technique is planned, are left out: they stand for states that another technique may take away.
    """
    born, died, size, category = (recording.columns[name] for name in ("born", "died", "size", "category"))
    steps = torch.tensor([mark.event for mark in recording.marks if mark.kind == "step"], dtype=torch.int64)
    within = torch.searchsorted(steps, born) == torch.searchsorted(steps, died)
    optimizer = category == OPTIMIZER
    chosen = [category == PARAMETERS, category == GRADIENTS, optimizer & ~within, optimizer & within]
    chosen += [category == ACTIVATIONS]
    chosen += [~torch.stack(chosen).any(0)]
    change = torch.zeros(len(PARTS), recording.events + 2, dtype=torch.int64)
    for row, mask in zip(change, chosen, strict=True):
        row.index_add_(0, born[mask] + 1, size[mask])
        row.index_add_(0, died[mask] + 1, -size[mask])
    live = change[:, : recording.events + 1].cumsum(1)
    marks = ((mark.event, mark.kind) for mark in recording.marks if mark.kind in (PLANNING, PLANNED))
    for (begun, kind), (ended, _) in itertools.pairwise([*marks, (recording.events, "")]):
        if kind == PLANNING:
            live[:, begun + 1 : ended + 1] = 0
    moments: set[int] = set()

    def with_further(first: int, total: torch.Tensor) -> None:
        for part in range(first, len(PARTS)):
            more = total + live[part]
            moments.add(int(more.argmax()))
            with_further(part + 1, more)

    with_further(0, torch.zeros_like(live[0]))
    return [live[:, moment].tolist() for moment in sorted(moments)]
