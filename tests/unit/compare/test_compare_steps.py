"""memopt.compare_steps: what it counts, what it says, and what it refuses."""

from __future__ import annotations

import gc
import json
import pickle
import re
import weakref

import pytest
import torch
from compared_steps import grows_by_32_mib

import memopt
from benchmarks.live_bytes import measure_step
from memopt._compare import steps as comparing
from memopt.types import MeasuredStep, StepComparison

MIB = 1 << 20
# What torch takes beside what a step asks for: numbers, indices.
LITTLE = 16 << 10


def mebibytes(count: int) -> torch.Tensor:
    return torch.ones(count * MIB // 4)


def holding(standing: int, passing: int):
    """A variant that keeps `standing` MiB, and in a step has `passing` more."""

    def build():
        kept = mebibytes(standing)

        def step() -> float:
            return float(mebibytes(passing)[0] + kept[0])

        return step

    return build


def test_the_peak_is_what_the_variant_made():
    there_before = mebibytes(8)
    found = memopt.compare_steps({"more": holding(2, 3), "less": holding(1, 1)}, steps=3, device="cpu")
    assert 5 * MIB <= found["more"].peak_bytes <= 5 * MIB + LITTLE
    assert 2 * MIB <= found["less"].peak_bytes <= 2 * MIB + LITTLE
    assert sum(found["more"].by_category.values()) == found["more"].peak_bytes
    assert found.saved("less") == pytest.approx(0.6, abs=0.01)
    assert found["less"].losses == [2.0] * 3 and found["less"].failed == ""
    del there_before


def test_what_building_took_for_a_moment_is_said_and_not_counted():
    def build():
        mebibytes(6)
        return holding(1, 1)()

    found = memopt.compare_steps({"built": build}, steps=3, device="cpu")
    assert found["built"].peak_bytes <= 2 * MIB + LITTLE
    assert 6 * MIB <= found["built"].building_bytes <= 6 * MIB + LITTLE
    assert "built: building it took 6.0" in str(found)


def test_a_training_steps_peak_is_the_one_counted_by_operations():
    def parts():
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        x = torch.ones(1024, 256)
        return model, torch.optim.AdamW(model.parameters()), x, lambda: model(x).square().mean()

    def plain():
        _, optimizer, _, loss_of = parts()

        def step() -> torch.Tensor:
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    found = memopt.compare_steps({"plain": plain}, steps=3, device="cpu")["plain"]
    model, optimizer, x, loss_of = parts()
    counted = measure_step(model, optimizer, loss_of, [x])
    assert abs(found.peak_bytes - counted.peak) <= LITTLE
    assert found.by_category["parameters"] == counted.parameters
    assert abs(found.by_category["optimizer"] - counted.optimizer_state) <= LITTLE
    assert len(found.losses) == 3 and found.losses[2] < found.losses[0] and len(found.seconds) == 1


def test_an_out_of_memory_is_a_result_and_lets_go():
    held = []

    def build():
        def step():
            big = mebibytes(4)
            held.append(weakref.ref(big))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total")

        return step

    found = memopt.compare_steps({"fits": holding(1, 1), "does not": build}, steps=3, device="cpu")
    gc.collect()
    assert held[0]() is None
    assert found["does not"].failed == "CUDA out of memory. Tried to allocate 9.00 GiB"
    assert found.saved("does not") is None and found.time_ratio("does not") is None
    assert re.search(r"does not\s+out of memory\n", str(found))
    assert "does not: CUDA out of memory. Tried to allocate 9.00 GiB" in str(found)


def test_every_form_of_an_out_of_memory_is_one():
    held = []

    def asks_too_much():
        big = mebibytes(4)
        held.append(weakref.ref(big))
        torch.empty(1 << 50)

    def follows_one():
        try:
            asks_too_much()
        except RuntimeError as error:
            raise LookupError("of the variant") from error

    def says_nothing():
        raise MemoryError

    variants = {step.__name__: lambda step=step: step for step in (asks_too_much, follows_one, says_nothing)}
    found = memopt.compare_steps(variants, steps=3, device="cpu")
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    for name in ("asks_too_much", "follows_one"):
        assert "DefaultCPUAllocator: can't allocate memory" in found[name].failed
    assert found["says_nothing"].failed == "MemoryError"


def test_other_errors_are_the_callers_and_the_recorder_stops():
    def build():
        raise LookupError("of the variant")

    with pytest.raises(LookupError, match="of the variant"):
        memopt.compare_steps({"one": build}, device="cpu")
    with memopt.profile("cpu") as prof:
        mebibytes(1)
    assert prof.peak_bytes >= MIB


def test_within_a_profile_its_recorder_is_used_and_goes_on():
    with memopt.profile("cpu") as prof:
        found = memopt.compare_steps({"one": holding(1, 2)}, steps=3, device="cpu")
        mebibytes(9)
    assert 3 * MIB <= found["one"].peak_bytes <= 3 * MIB + LITTLE
    assert prof.peak_bytes >= 9 * MIB


def measured(peak: int, seconds: list[float], **more) -> MeasuredStep:
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "inputs", "other"), 0)
    given = {"building_bytes": 0, "held_bytes": None, "resident_bytes": None, "losses": [1.0, 0.5]} | more
    return MeasuredStep(peak_bytes=peak, by_category=parts | {"activations": peak}, seconds=seconds, **given)


MADE = StepComparison(
    {
        "plain": measured(100 * MIB, [0.010, 0.011, 0.012]),
        "slow": measured(40 * MIB, [0.020, 0.022, 0.024]),
        "<same>": measured(110 * MIB, [0.009, 0.011, 0.014]),
    },
    5,
    "cpu",
)


def test_a_time_differs_only_where_the_middle_halves_do_not_overlap():
    assert MADE.time_ratio("slow") == pytest.approx(2.0)
    assert MADE.time_ratio("<same>") is None
    assert [MADE.saved(name) for name in MADE.measured] == [0.0, pytest.approx(0.6), pytest.approx(-0.1)]


def test_the_text_the_table_and_the_numbers_say_the_same():
    lines = str(MADE).splitlines()
    assert lines[0].startswith("5 steps each on cpu") and "median time" in lines[0]
    assert lines[1].split() == ["peak", "saved", "a", "step", "time", "last", "loss"]
    assert lines[2].split() == ["plain", "100", "MiB", "11", "ms", "0.5000"]
    assert lines[3].split() == ["slow", "40.0", "MiB", "60%", "22", "ms", "2.00", "x", "0.5000"]
    assert lines[4].split()[:6] == ["<same>", "110", "MiB", "-10%", "11", "ms"]
    assert "within the noise" in lines[4]
    page = MADE._repr_html_()
    assert "&lt;same&gt;" in page and "<same>" not in page and "<script" not in page
    assert "<td>60%</td>" in page and page.count("display:flex") == 3
    numbers = json.loads(json.dumps(MADE.as_dict()))
    assert numbers["variants"]["slow"]["saved"] == pytest.approx(0.6)
    assert numbers["variants"]["slow"]["step_seconds"] == pytest.approx(0.022)


def test_without_times_and_losses_there_are_no_such_columns():
    found = StepComparison(
        {"one": measured(MIB, [], losses=[], held_bytes=2 * MIB, resident_bytes=3 * MIB)}, 3, "cuda"
    )
    assert "a step" not in str(found) and "last loss" not in str(found)
    assert "simulated" in str(found) and "allocator held" in str(found) and "process grew by" in str(found)


def test_what_is_not_a_comparison_is_refused():
    def no_step():
        return 3

    for variants, options, error, words in (
        ({}, {}, ValueError, "nothing to compare"),
        ({"a": 1}, {}, TypeError, "variant 'a' is int"),
        ({"a": no_step}, {}, TypeError, "no_step gave int"),
        ({"a": holding(1, 1)}, {"steps": 2}, ValueError, "steps=2"),
        ({"a": holding(1, 1)}, {"device": "meta"}, ValueError, "meta"),
        ({"a": holding(1, 1)}, {"fresh_process": True}, RuntimeError, "cannot be sent to a fresh process"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            memopt.compare_steps(variants, **{"device": "cpu", **options})


def test_a_fresh_process_tells_by_how_much_it_grew():
    found = memopt.compare_steps({"one": grows_by_32_mib}, steps=3, device="cpu", fresh_process=True)["one"]
    assert 32 * MIB <= found.peak_bytes <= 32 * MIB + LITTLE
    assert 32 * MIB <= found.resident_bytes < 160 * MIB  # and what torch loads meanwhile


def test_an_error_in_a_fresh_process_comes_back(monkeypatch):
    class Pipe:
        def send(self, thing):
            self.sent = pickle.loads(pickle.dumps(thing))

        def close(self):
            pass

    class OwnError(Exception):
        """Cannot be pickled: it is local."""

    def fails(*_):
        raise OwnError("of the step")

    pipe = Pipe()
    monkeypatch.setattr(comparing, "measure", fails)
    comparing._answer(pipe, grows_by_32_mib, 3, "cpu")
    assert type(pipe.sent) is RuntimeError and str(pipe.sent) == "OwnError: of the step"
