"""Advice to write in place, or to delete: only where the peak would have been lower."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from made_recordings import anything

import memopt
import memopt._memory.recording.session
from memopt._memory.recording import inplace_advice as in_place
from memopt._memory.recording.inplace_advice import rewritten

N = 1 << 18  # elements: a MiB
MIB = 1 << 20
NOISE = 1 << 16  # small tensors of an earlier recording


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        ("x = x * 2", "x *= 2"),
        ("x = x + self.bias", "x += self.bias"),
        ("x = x.relu()", "x.relu_()"),
        ("x = torch.sigmoid(x)", "torch.sigmoid_(x)"),
        ("x = F.dropout(x, 0.5)", "x = F.dropout(x, 0.5, inplace=True)"),
        ("y = x * 2", ""),
        ("x = 2 - x", ""),
        ("x = x @ w", ""),  # no operation on each element by itself
        ("x = x + f(z)", ""),  # what f makes may be what was seen
        ("x = F.gelu(x)", ""),
        ("x = F.linear(x, w)", ""),
        ("x *= 2", ""),
        ("x[0] = x[0] * 2", ""),
        ("x = (x *", ""),
        ("x = x * 2; y = 1", ""),
        ("", ""),
    ],
)
def test_lines_that_could_write_where_they_read(source, instead):
    assert rewritten(source) == instead


@pytest.fixture(autouse=True)
def nothing_dies_on_the_way() -> None:
    """Of what other tests have left."""
    gc.collect()


def doubled(in_place: bool) -> memopt._memory.recording.session.Profile:
    with torch.no_grad(), memopt.profile("cpu") as prof:
        x = torch.ones(N)
        if in_place:
            x *= 2
        else:
            x = x * 2
    return prof


def test_a_line_that_had_two_where_one_would_do_is_named_with_what_it_would_save():
    prof = doubled(in_place=False)
    (found,) = in_place.find(prof.recording)
    assert found.saves == MIB and found.text == "x = x * 2" and found.instead == "x *= 2"
    assert str(found) == f"-1.00 MiB at the peak from {found.line} in place: `x *= 2`"
    assert str(found) in str(prof) and prof.as_dict()["in_place"] == [vars(found)]
    assert "x *= 2" in prof._repr_html_()
    mended = doubled(in_place=True)
    assert mended.peak_bytes == pytest.approx(prof.peak_bytes - found.saves, abs=NOISE), "it is what it says"
    assert in_place.find(mended.recording) == []


def test_where_the_graph_needs_the_old_one_nothing_is_said():
    weight = torch.ones((), requires_grad=True)
    with memopt.profile("cpu") as prof:
        x = torch.ones(N)
        x = x * weight
    assert in_place.find(prof.recording) == [] and x.requires_grad


def test_where_the_peak_is_elsewhere_nothing_is_said():
    with torch.no_grad(), memopt.profile("cpu") as prof:
        high = torch.ones(3 * N)
        del high
        x = torch.ones(N)
        x = x * 2
    assert in_place.find(prof.recording) == [] and prof.peak_bytes >= 3 * MIB and x.numel() == N


def test_what_another_variable_has_is_not_written_to():
    with torch.no_grad(), memopt.profile("cpu") as prof:
        x = torch.ones(N)
        kept = x
        x = x * 2
    assert in_place.find(prof.recording) == [] and kept is not x


def steps(delete: bool, higher: int = 0):
    """`out` of one step lives while the next one makes its own."""
    out = None
    with memopt.profile("cpu") as prof:
        for _ in range(4):
            hidden = torch.ones(4 * N)
            out = hidden[:N].clone()
            del hidden
            if higher:
                torch.ones(higher)
            if delete:
                del out
            prof.step()
    return prof


def test_what_a_del_would_have_saved_is_said_and_is_what_it_saves():
    prof = steps(delete=False)
    (leak,) = [leak for leak in prof.leaks() if leak.kind == "kept"]
    assert (
        leak.bytes == leak.saves == MIB
        and "at the end of its step, if nothing needs it later: -1.00 MiB at the peak" in str(leak)
    )
    assert steps(delete=True).peak == pytest.approx(prof.peak - leak.saves, abs=NOISE)


def test_a_del_that_would_not_lower_the_peak_is_not_advised():
    prof = steps(delete=False, higher=5 * N)
    assert prof.peak >= 6 * MIB
    assert not any(leak.saves for leak in prof.leaks()) and "`del " not in str(prof)


def test_what_is_saved_is_the_peak_less_that_of_the_shorter_lives():
    """Against the definition, of any recording."""
    tried = 0
    for seed in range(60):
        recording, rng = anything(seed), random.Random(seed)
        if not recording.blocks or not recording.events:
            continue
        tried += 1
        chosen = rng.sample(range(recording.blocks), min(5, recording.blocks))
        born, died = recording.columns["born"], recording.columns["died"]
        since = [rng.randint(int(born[block]) + 1, recording.events) for block in chosen]
        live = []
        for event in range(-1, recording.events):
            alive = (born <= event) & (died > event)
            for block, end in zip(chosen, since, strict=True):
                alive[block] &= event < end
            live.append(int(recording.columns["size"][alive].sum()))
        found = in_place.lowered(recording, torch.tensor(chosen), torch.tensor(since))
        assert found == recording.peak()[0] - max(live), seed
    assert tried >= 20
