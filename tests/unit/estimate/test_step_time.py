"""The seconds of a step: a roofline on a made-up card, beside sums by hand."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from memopt._estimate import cards
from memopt._estimate.cards import Rates
from memopt._estimate.step_time import DISK_RATE, HOST, HOST_RATE, QUEUE, WAIT, Segment, seconds

MADE_UP = Rates("made-up", half=100e12, tf32=50e12, single=10e12, memory=1e12, link=10e9)


def test_an_operator_takes_what_bounds_it():
    """A product of 2 TFLOP beside 1 GB, a sum that reads 2 GB; bf16 runs at fp16's rate where the card has it."""
    for kind, took in (("fp16", 0.02), ("bf16", 0.02), ("tf32", 0.04), ("fp32", 0.2)):
        step = [Segment([(kind, 2e12, 1e9), ("fp32", 0.0, 2e9)])]
        assert seconds(step, MADE_UP) == pytest.approx(took + 0.002 + QUEUE)
    old = replace(MADE_UP, bf16=False)
    assert seconds([Segment([("bf16", 2e12, 0)])], old) == pytest.approx(0.2 + QUEUE)
    assert seconds([Segment(kernel_bytes=int(28e9))], MADE_UP) == pytest.approx(0.028)


def test_the_device_waits_for_a_host_that_is_slower():
    small, large = ("fp32", 0.0, 1.0), ("fp32", 0.0, 1e9)
    assert seconds([Segment([small] * 100)], MADE_UP) == pytest.approx(100 * QUEUE)
    assert seconds([Segment([large] + [small] * 100)], MADE_UP) == pytest.approx(0.001 + QUEUE)  # it is ahead
    read = [large, (WAIT, 0.0, 0.0), *[small] * 100]
    assert seconds([Segment(read)], MADE_UP) == pytest.approx(
        0.001 + 2 * QUEUE + 99 * QUEUE + QUEUE, rel=0.01
    )


def test_a_step_on_the_host_holds_up_what_comes_after_it():
    host, large = (HOST, 0.0, HOST_RATE / 2), ("fp32", 0.0, 1e9)
    assert seconds([Segment([host, large])], MADE_UP) == pytest.approx(0.501 + 2 * QUEUE)
    ours = [Segment(host_bytes=int(HOST_RATE / 2)), Segment([large])]
    assert seconds(ours, MADE_UP) == pytest.approx(0.501 + QUEUE)


def test_copies_beside_the_computation_count_where_they_outlast_it():
    """Of a segment of 0.1 s: both ways at once on other streams, one after another on the default one."""
    busy = Segment([("fp16", 10e12, 0)])
    plain = seconds([busy, busy], MADE_UP)
    for sizes, more in (
        ({"to_device": 10**9, "to_host": 10**9, "side_to_device": 10**9, "side_to_host": 10**9}, 0.0),
        ({"to_device": 3 * 10**9, "side_to_device": 3 * 10**9}, 0.2),
        ({"to_device": 10**9, "to_host": 10**9}, 0.2),
        ({"to_device": 10**9, "side_to_device": 10**9, "disk_bytes": int(DISK_RATE / 2)}, 0.4),
    ):
        assert seconds([busy, replace(busy, **sizes)], MADE_UP) - plain == pytest.approx(more, abs=1e-4)


def test_more_work_is_never_faster():
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    for _ in range(200):
        rows = [
            (chance.choice(["fp16", "fp32", WAIT]), chance.random() * 1e12, chance.random() * 1e10)
            for _ in range(20)
        ]
        step = [Segment(rows[:10], side_to_host=10**9, to_host=10**9), Segment(rows[10:], 10**9)]
        twice = [
            replace(
                one, operators=[(kind, 2 * operations, 2 * size) for kind, operations, size in one.operators]
            )
            for one in step
        ]
        taken = seconds(step, MADE_UP)
        assert taken <= seconds(twice, MADE_UP) <= 2 * taken
        assert taken <= seconds([*step, Segment([rows[0]])], MADE_UP)


def test_each_card_has_rates_and_a_size_has_those_of_the_nearest():
    for card in cards.CARDS:
        rates = card.rates
        assert rates.of == card.name
        assert rates.half >= rates.tf32 >= rates.single > 0 and rates.memory > 5 * rates.link > 0
    assert cards.card("12GiB").rates.of == "rtx3060" and cards.card("79GiB").rates.of == "h100"
    assert not cards.card("t4").rates.bf16 and cards.card("b200").rates.bf16


def test_the_step_in_whose_hook_a_trace_begins_is_not_of_it():
    """Its node, written as it ends, has a number of the trace before: here that of the last mark's parent."""
    pytest.importorskip("torch")
    from memopt._estimate.step_trace import _MARK, _operators

    def node(number, parent, record, name="PythonDispatchMode"):
        attributes = [{"name": "rf_id", "value": record}, {"name": "op_schema", "value": ""}]
        return {"id": number, "ctrl_deps": parent, "name": name, "attrs": attributes}

    begin = [node(1, 1, 0, "process"), node(2, 1, 0, "thread"), node(3, 2, 20), node(4, 2, 21, _MARK)]
    late = node(5, 3, 9, "Optimizer.step#Adam.step")
    assert len(list(_operators({"nodes": [late, *begin, node(5, 2, 22), node(6, 5, 23, _MARK)]}))) == 2
