"""The part `estimate` of `memopt gpu-check`: each fault that is planted in what it compares is reported."""

from __future__ import annotations

import copy
import ctypes
from types import SimpleNamespace

import pytest
import torch

import memopt
from memopt._estimate import cards
from memopt._gpu_check import estimate_part
from memopt._gpu_check.part_outcome import PartRequest

SIM = {"memory": "1GiB"}
ASKED = PartRequest("estimate", True, simulated=True)


@pytest.fixture(scope="module")
def steps():
    return estimate_part.steps(ASKED)


def test_a_peak_that_is_not_as_predicted_is_wrong(monkeypatch, steps):
    stated = SimpleNamespace(allocated_bytes=(1 << 20, 2 << 20), needed_bytes=(1, 2), method="planted")
    monkeypatch.setattr(memopt, "estimate", lambda *_, **__: stated)
    monkeypatch.setattr(estimate_part, "ask_child", lambda *_: (steps, ""))
    found = estimate_part.estimate(ASKED)
    assert found.status == "wrong" and "predicted peak: off by" in found.text
    assert found.figures["context and libraries"] == "not here: it was there before"


def test_a_range_is_right_where_it_holds_the_measured_bytes():
    assert estimate_part._beyond((90, 110), 100) == 0
    assert estimate_part._beyond((110, 120), 100) == pytest.approx(0.1)
    assert estimate_part._beyond((70, 80), 100) == pytest.approx(0.2)


def test_the_same_device_has_the_same_requests_at_the_same_places(steps):
    figures: dict = {}
    there, said = estimate_part.ask_child(
        ASKED._replace(part="steps", contender=estimate_part._like_this_card())
    )
    assert said == "" and estimate_part.differences(steps, there, figures) == ""
    count = len(steps["requests"])
    assert figures["requests"] == count > 500
    assert figures["requests at the simulated device's place"] == count


def test_another_request_and_other_bytes_held_are_wrong_and_another_place_is_a_figure(steps):
    def differences(**changed):
        figures: dict = {}
        said = estimate_part.differences(steps, {**copy.deepcopy(steps), **changed}, figures)
        return said, figures

    sizes = list(steps["requests"])
    said, _ = differences(requests=[*sizes[:5], sizes[5] + 512, *sizes[6:]])
    assert said.startswith(
        f"request 5 of {len(sizes)} is of {sizes[5]} bytes here, of {sizes[5] + 512} bytes"
    )
    said, _ = differences(requests=sizes[:-1])
    assert "of no bytes there" in said
    said, _ = differences(held=[held * 11 // 10 for held in steps["held"]])
    assert said == "what is held after a step differs by 10.0%"
    said, figures = differences(places=[[9, 0], *steps["places"][1:]], ascending=not steps["ascending"])
    assert said == "" and figures["requests at the simulated device's place"] == len(sizes) - 1


def test_a_simulated_device_that_fails_is_wrong(monkeypatch, steps):
    stated = SimpleNamespace(allocated_bytes=(steps["peak"],) * 2, needed_bytes=(1, 2), method="planted")
    monkeypatch.setattr(memopt, "estimate", lambda *_, **__: stated)
    monkeypatch.setattr(estimate_part, "_like_this_card", lambda: "memory=1")
    found = estimate_part.estimate(ASKED)
    assert found.status == "wrong" and "simulated device" in found.text and "memory" in found.text


@pytest.mark.sampled("faults that gpu-check finds")
@pytest.mark.parametrize("context", ["900MiB", "100MiB"])
def test_a_context_of_other_bytes_than_assumed_is_wrong(run_script, context):
    done = run_script(
        f"""
import memopt.sim
memopt.sim.activate(memory="2GiB", context="{context}")
import memopt
from types import SimpleNamespace
from memopt._gpu_check import estimate_part
from memopt._gpu_check.part_outcome import PartRequest
stated = SimpleNamespace(allocated_bytes=(0, 1 << 40), needed_bytes=(0, 1 << 40), method="planted")
memopt.estimate = lambda *_, **__: stated
estimate_part.ask_child = lambda *_: ({{}}, "planted")
found = estimate_part.estimate(PartRequest("estimate", True, True))
assert found.figures["context and libraries, bytes"] == memopt._C.parse_size("{context}"), found
assert "context and libraries take" in found.text, found
"""
    )
    assert done.returncode == 0, done.stderr
    assert cards.CONTEXT_RANGE[0] < cards.CONTEXT < cards.CONTEXT_RANGE[1]


def test_without_nvml_the_context_is_not_measured(monkeypatch):
    library = ctypes.CDLL

    def without(name, *given):
        if "nvidia-ml" in name:
            raise OSError(f"{name}: not found")
        return library(name, *given)

    assert estimate_part._used_bytes() >= torch.cuda.memory_reserved()
    monkeypatch.setattr(ctypes, "CDLL", without)
    assert estimate_part._used_bytes() == "libnvidia-ml.so.1: not found"
