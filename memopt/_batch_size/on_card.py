"""The largest batch size for a card that is not here, from runs on the simulated device."""

from __future__ import annotations

import time
from typing import Any

from memopt import _C
from memopt._batch_size.bracket import Bracket
from memopt._batch_size.result import FoundBatchSize, NoBatchSizeFits, Trial
from memopt._estimate import cards, model


def on_card(
    subject: Any,
    sample: Any,
    card: str | int,
    optimizer: Any,
    bounds: tuple[int, int, int],
    unit: int,
    headroom: float,
    within: float,
    steps: int,
    unprotected: bool,
) -> FoundBatchSize:
    """bounds: start, least and most, in units. ValueError for a card that is none, or a sample without a batch."""
    whole = cards.card(card)
    room = int((1 - headroom) * whole.usable)
    limited = cards.Card(whole.name, room, whole.compute_capability, whole.multiprocessors, whole.context)
    size = model.batch_of(sample)
    if size is None:
        raise ValueError("card=: pass sample=, a batch of any size, whose first dimension is the batch's")
    tried: list[Trial] = []
    notes: dict[str, None] = {}
    begun = time.perf_counter()
    bracket = Bracket(*bounds, room, within)
    while (probe := bracket.next()) is not None:
        count, since = probe * unit, time.perf_counter()
        batch = model.resized(sample, size, count)
        told = model.estimate(
            subject, batch, optimizer=optimizer, steps=steps, quick=True, unprotected=unprotected
        )
        fits = told.fits(limited)
        why = "" if fits else f"{_C.format_size(told.needed[1])} needed"
        peak, held = told.peak[1], told.needed[1]
        tried.append(Trial(count, fits, told.steps, peak, held, time.perf_counter() - since, why=why))
        notes[f"by memopt.estimate, on {told.method}"] = None
        if fits:
            bracket.fits(probe, held)
        else:
            bracket.fails(probe)
    if bracket.best is None:
        smallest = min(tried, key=lambda trial: trial.batch_size)
        raise NoBatchSizeFits(
            f"no batch size fits on {whole}: a step with {smallest.batch_size} takes {smallest.held} bytes, and "
            f"{_C.format_size(room)} may be taken",
            smallest.held,
            tried,
        )
    above = bracket.high * unit
    failed = [trial.why for trial in tried if trial.batch_size == above]
    return FoundBatchSize(
        batch_size=bracket.best * unit,
        device=whole.name,
        room=room,
        total=whole.usable,
        headroom=headroom,
        stopped=f"{above} does not fit: {failed[-1]}" if failed else f"the maximum, below {above}",
        tried=tried,
        seconds=time.perf_counter() - begun,
        notes=list(notes),
    )
