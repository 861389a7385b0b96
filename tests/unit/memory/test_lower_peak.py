"""Advice on the peak of a recording: changes with their bytes, cost and line; nothing where nothing is known."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt._memory.recording import lower_peak
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    COLUMNS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Mark,
    Recording,
)

MIB = 1 << 20
ADAMW = [{"kind": "AdamW", "options": []}]


def recorded(
    blocks: list[tuple[int, int, int, int]], steps: list[int], device: str = "cuda:0", **facts
) -> Recording:
    """Blocks of (born, died, MiB, category); steps end at these events."""
    born, died, size, category = torch.tensor(blocks).t().contiguous()
    columns = dict.fromkeys(COLUMNS, torch.zeros_like(born)) | {
        "born": born,
        "died": died,
        "size": size * MIB,
    }
    columns |= {"address": (size.cumsum(0) - size) * MIB, "category": category}
    events = int(died.max())
    marks = [Mark(event, "step") for event in steps]
    return Recording(
        device,
        "made up",
        columns,
        torch.arange(events),
        marks=marks,
        facts=facts,
    )


def saved(recording: Recording, **more) -> dict[str, int]:
    """MiB of each suggestion, by its line to write."""
    found = lower_peak.find(recording, **more)
    assert all(one.peak == recording.peak()[0] - one.saves for one in found)
    assert [one.saves for one in found] == sorted((one.saves for one in found), reverse=True)
    return {one.paste: round(one.saves / MIB) for one in found}


# A step: parameters and states stay; at event 2 activations, then the optimizer's temporaries at event 5.
STEP = [(-1, 9, 100, PARAMETERS), (-1, 9, 200, OPTIMIZER), (2, 4, 300, ACTIVATIONS), (5, 6, 400, OPTIMIZER)]


def test_states_and_temporaries_are_worked_out_at_the_peak_that_is_left():
    recording = recorded(STEP, [6], optimizers=ADAMW)
    found = saved(recording)
    # Of 700 MiB 600 are left without temporaries, and of these a hundredth is kept for what is not worked out.
    assert found["torch.optim.AdamW(..., fused=True)"] == 94
    assert found["memopt.optim.AdamW(..., state_bits=8)"] == 246
    assert found["memopt.optim.AdamW(..., offload_states=True)"] == 296
    costs = {one.paste: one.cost for one in lower_peak.find(recording)}
    assert costs["memopt.optim.AdamW(..., state_bits=8)"] == "other results: states of 8 bits"
    assert "copies 200 MiB there and back" in costs["memopt.optim.AdamW(..., offload_states=True)"]


@pytest.mark.parametrize(
    ("optimizers", "has", "lacks"),
    [
        ([{"kind": "AdamW", "options": ["fused"]}], "state_bits", "fused=True"),
        ([{"kind": "Adam", "options": ["amsgrad"]}], "fused=True", "state_bits"),
        ([{"kind": "SGD", "options": []}], "offload_states", "state_bits"),
        ([{"kind": "AdamW", "options": []}, {"kind": "", "options": []}], None, "optim"),
        (None, None, "optim"),
        ("hostile", None, "optim"),
    ],
)
def test_an_optimizers_change_is_told_where_all_optimizers_can_have_it(optimizers, has, lacks):
    lines = " ".join(saved(recorded(STEP, [6], optimizers=optimizers)))
    assert (has is None or has in lines) and lacks not in lines


def test_nothing_goes_to_the_host_where_the_memory_is_the_hosts():
    lines = " ".join(saved(recorded(STEP, [6], device="cpu", optimizers=ADAMW)))
    assert "state_bits" in lines and "offload" not in lines


def test_gradients_that_outlive_their_step_could_be_freed():
    late = [
        (-1, 30, 10, PARAMETERS),
        (2, 4, 50, ACTIVATIONS),
        (3, 15, 40, GRADIENTS),
        (12, 18, 50, ACTIVATIONS),
    ]
    late += [(17, 29, 40, GRADIENTS), (24, 28, 50, ACTIVATIONS)]
    assert saved(recorded(late, [6, 20])) == {}, (
        "the peak is with the gradients that the backward pass needs anyway"
    )
    late[3] = (12, 18, 150, ACTIVATIONS)
    assert saved(recorded(late, [6, 20])) == {}, "nor of two peaks the first alone"
    late[4] = (19, 29, 40, GRADIENTS)
    assert saved(recorded(late, [6, 20])) == {"optimizer.zero_grad() right after optimizer.step()": 40}


def test_leaks_that_raise_the_peak_are_told_with_the_variable():
    leak = Leak("kept", "train.py:9", "out = model(x)", 90 * MIB, 1, 0, "activations", saves=90 * MIB)
    recording = recorded([(-1, 5, 100, PARAMETERS), (1, 4, 90, ACTIVATIONS)], [2])
    assert saved(recording, leaks=[leak]) == {"del out": 90}
    other = Leak("kept", "train.py:9", "f(x)", 90 * MIB, 1, 0, "activations", saves=90 * MIB)
    assert saved(recording, leaks=[other]) == {"": 90}


def test_what_saves_next_to_nothing_is_not_told():
    tiny = [(-1, 9, 1000, PARAMETERS), (-1, 9, 4, OPTIMIZER)]
    assert lower_peak.find(recorded(tiny, [6], optimizers=ADAMW)) == []


def test_a_recording_knows_its_optimizers():
    model = torch.nn.Linear(64, 64)
    first, second = torch.optim.AdamW(model.parameters(), amsgrad=True), torch.optim.SGD(model.parameters())
    with memopt.profile("cpu") as prof:
        model(torch.randn(8, 64)).sum().backward()
        first.step(), second.step()
    assert prof.recording.facts["optimizers"] == [
        {"kind": "AdamW", "options": ["amsgrad"]},
        {"kind": "SGD", "options": []},
    ]
