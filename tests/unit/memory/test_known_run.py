"""A run of which the end is taken away: what is said to come is what came."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import torch
from made_recordings import training

from memopt._memory.oom.known_run import NEVER, BlockTable, known_run
from memopt._memory.recording.recording import Mark, Recording

STEPS = 6


def failed_at(recording: Recording, event: int) -> Recording:
    """As if the block of this event had not been given."""
    block = int((recording.columns["born"] == event).nonzero())
    asked = int(recording.columns["size"][block]), int(recording.columns["stack"][block])
    marks = [mark for mark in recording.marks if mark.event < event]
    return replace(recording, marks=[*marks, Mark(event - 1, "oom")], facts={"asked": [asked]})


def sizes(blocks: BlockTable) -> list[int]:
    """The requests and frees in order, as + and -."""
    return [size or -int(blocks.size[number]) for number, size, _ in blocks.operations().tolist()]


def peak(changes: list[int]) -> int:
    return int(torch.tensor([0, *changes]).cumsum(0).max())


def test_the_iteration_that_comes_is_the_one_that_was():
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    whole = training(STEPS)
    ends = [mark.event for mark in whole.marks if mark.kind == "step"]
    born = whole.columns["born"]
    events = [event for event in born.tolist() if ends[1] < event <= ends[STEPS - 3]]
    for event in chance.sample(events, 40):
        run = known_run(failed_at(whole, event))
        assert run is not None and run.lag, event
        known = run.completed(run.blocks)
        assert known is not None
        asked = [size for size in sizes(known) if size > 0]
        after = torch.sort(born[(born >= 0)]).values
        count = int((born <= event).sum()) + run.lag
        order = torch.argsort(born, stable=True)
        assert asked == whole.columns["size"][order][:count].tolist()
        assert peak(sizes(known)) == whole.peak()[0] and len(after) >= count


def test_a_first_step_shows_nothing_of_its_rest():
    whole = training(STEPS)
    first = next(mark.event for mark in whole.marks if mark.kind == "step")
    born = whole.columns["born"]
    event = int(born[born < first].max())
    run = known_run(failed_at(whole, event))
    assert run is not None and run.lag == 0 and run.completed(run.blocks) is None


def test_without_a_failed_request_there_is_nothing_to_know():
    assert known_run(training(3)) is None


def test_what_is_left_out_is_left_out_of_what_comes_too():
    whole = training(STEPS)
    ends = [mark.event for mark in whole.marks if mark.kind == "step"]
    born = whole.columns["born"]
    run = known_run(failed_at(whole, int(born[born > ends[2]].min()) + 4))
    assert run is not None and run.lag
    passing = run.blocks.died < NEVER
    none = replace(run.blocks, there=run.blocks.there & ~passing)
    known = run.completed(none)
    assert known is not None
    assert 0 < peak(sizes(known)) < peak(sizes(run.completed(run.blocks)))
