"""Warnings of growth: planted leaks are named, a run without one is never looked at, and looking costs what it may."""

from __future__ import annotations

import gc
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import memopt
from memopt._memory.live import growth
from memopt._memory.live.growth import GrowthWarning, GrowthWatch, compare
from memopt._memory.live.heap_snapshot import HeapSnapshot
from memopt._memory.live.live_tensors import LiveGroup, LiveTensors
from memopt._memory.live.variables import Variables

STEPS = 8 * (1 + growth.RISES + 1 + 1) + 1


class Clock:
    """Each look at it is a second later than the last."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[GrowthWatch]:
    """On the number that `level` says, not the process's."""
    gc.collect()
    level = [0]

    def values(self: growth._Reading) -> list[int]:
        self.noise = [0]
        level[0] += 512
        return [level[0]]

    monkeypatch.setattr(growth._Reading, "values", values)
    found = GrowthWatch(window=8, share=1e9)
    found.start()
    yield found
    found.stop()


def train(step: Callable[[nn.Module], None], steps: int = STEPS) -> list[str]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if one.category is GrowthWarning]


def test_a_sum_of_losses_is_named_with_its_graph(watch: GrowthWatch):
    total = torch.zeros(())

    def step(model: nn.Module) -> None:
        nonlocal total
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        total = total + loss

    line = step.__code__.co_firstlineno + 4
    said = train(step)
    assert len(said) == 1
    assert said[0].startswith("+") and f"/step from test_growth.py:{line}, total holds a graph of " in said[0]
    assert said[0].endswith(" nodes; use .item() or .detach()")


def test_a_growing_list_is_named_once(watch: GrowthWatch):
    outputs = []

    def step(model: nn.Module) -> None:
        outputs.append(model(torch.ones(4, 8)))

    line = step.__code__.co_firstlineno + 1
    said = train(step, steps=4 * STEPS)
    assert len(said) == 1, said
    # 128 bytes of an output and 128 of the input that its graph keeps, a step.
    assert f"+256 B/step from test_growth.py:{line}, outputs[*] holds " in said[0]
    assert said[0].endswith("with graphs; use .item() or .detach()")


def test_tensors_without_a_graph_are_to_be_deleted(watch: GrowthWatch):
    class Loader:
        def __init__(self) -> None:
            self.seen: dict[int, torch.Tensor] = {}

    loader = Loader()

    def step(model: nn.Module) -> None:
        loader.seen[len(loader.seen)] = torch.ones(16, 16)

    line = step.__code__.co_firstlineno + 1
    (said,) = train(step)
    assert said.startswith(f"+1.00 KiB/step from test_growth.py:{line}, loader.seen[*] holds ")
    assert said.endswith("tensors; del those that are not needed")


def test_what_a_cycle_holds_is_said_to_have_no_name(watch: GrowthWatch):
    gc.disable()
    try:

        def step(model: nn.Module) -> None:
            held: list[object] = [torch.ones(16, 16)]
            held.append(held)

        (said,) = train(step)
    finally:
        gc.enable()
        gc.collect()
    assert "that no variable reaches" in said


def test_a_false_alarm_says_nothing_and_doubles_the_window(watch: GrowthWatch):
    assert train(lambda model: model(torch.ones(4, 8)).sum().backward(), steps=2 * STEPS) == []
    assert watch._window >= 16


def test_a_level_that_goes_up_and_down_is_no_alarm(watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch):
    looked = []
    monkeypatch.setattr(watch, "_look", lambda: looked.append(1))
    level = [0]

    def values(self: growth._Reading) -> list[int]:
        self.noise = [0]
        level[0] += 1
        return [1000 * (level[0] % 20)]

    monkeypatch.setattr(growth._Reading, "values", values)
    assert train(lambda model: model(torch.ones(4, 8)).sum().backward(), steps=200) == [] and not looked


def test_looking_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch):
    watch = GrowthWatch(window=8, share=0.01, clock=Clock())
    watch._cost = 1.0
    assert watch._clock() == 1.0 and not watch._may_look()  # a hundredth of 2 s
    watch._clock.now = 150.0  # type: ignore[attr-defined]
    assert watch._may_look()
    watch._spent = 1.0
    assert not watch._may_look()


def test_a_look_has_the_time_that_is_left_of_the_share(monkeypatch: pytest.MonkeyPatch):
    given = []
    complete = [False]

    def take(seconds: float, graph_seconds: float) -> HeapSnapshot:
        given.append((seconds, graph_seconds))
        return HeapSnapshot({}, [], {}, [], [], Variables(set(), 0.0), complete[0])

    monkeypatch.setattr(growth.heap_snapshot, "take", take)
    clock = Clock()
    watch = GrowthWatch(window=8, share=0.01, clock=clock)
    clock.now = 99.0
    watch._look()  # between two looks at the clock a second passes
    assert given == [(0.5, 0.5)] and watch._spent == 1.0
    assert watch._cost == 2.0, "one that was cut short needs more"
    clock.now = 298.0
    assert not watch._may_look(), "a second is spent, two are needed, and three have not passed in the share"
    clock.now = 499.0
    complete[0] = True
    watch._look()
    assert given[1] == (2.0, 2.0) and watch._cost == 1.0
    clock.now = 1e6
    watch._look()
    assert given[2] == (growth._LONGEST, growth._LONGEST)


def test_one_warning_names_all_that_grow_much(watch: GrowthWatch):
    outputs, seen, little = [], {}, []

    def step(model: nn.Module) -> None:
        outputs.append(torch.ones(1024))
        seen[len(seen)] = torch.ones(512)
        little.append(torch.ones(1))

    line = step.__code__.co_firstlineno + 1
    (said,) = train(step)
    first, second = said.split("\n")
    assert first.startswith(f"+4.00 KiB/step from test_growth.py:{line}, outputs[*] holds ")
    assert second.startswith(f"+2.00 KiB/step from test_growth.py:{line + 1}, seen[*] holds ")


def test_the_steps_of_a_second_optimizer_do_not_count(watch: GrowthWatch):
    model = nn.Linear(2, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for _ in range(3):
        first.step()
        second.step()
    assert watch._steps == 3
    del first
    gc.collect()
    second.step()
    assert watch._steps == 4


def test_an_error_of_the_watch_does_not_reach_the_program(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
):
    def fails() -> None:
        raise RuntimeError("of the watch")

    monkeypatch.setattr(watch, "_step", fails)
    assert train(lambda model: None, steps=2) == [] and watch._handle is None


def test_the_process_and_its_pages_are_read():
    size = 64 << 20
    reading = growth._Reading()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = reading.values()
        held[::4096] = b"x" * (size // 4096)
        after = reading.values()
    assert len(before) == 1 and after[0] - before[0] >= size // 2


def test_two_looks_at_the_same_differ_in_nothing():
    held = [torch.ones(8) for _ in range(5)]
    look = memopt.live_tensors()
    assert compare(look, look, 1) == [] and len(held) == 5


def test_inputs_and_activations_of_one_name_are_one():
    def group(category, count, nodes):
        return LiveGroup(
            64 * count, count, "cpu", category, "held", "", "a.py:1", "", nodes, False, True, False
        )

    def look(*groups):
        return LiveTensors(tensors=[], groups=list(groups), top=8, complete=True, devices={})

    before = look(group("activations", 1, 3), group("inputs", 4, 0))
    assert compare(before, before, 1) == []
    assert compare(before, look(group("inputs", 5, 0)), 1) == []  # one is of another category now
    (grown,) = compare(before, look(group("inputs", 5, 0), group("activations", 3, 3)), 1)
    assert (grown.tensors, grown.nbytes, grown.group.count) == (3, 3 * 64, 8)


def test_enable_watches_and_disable_ends_it():
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    memopt.enable()
    memopt.enable()
    assert len(optimizer._global_optimizer_post_hooks) == before + 1
    memopt.disable()
    assert len(optimizer._global_optimizer_post_hooks) == before
    assert sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__ != "memopt._memory.oom.observer"
