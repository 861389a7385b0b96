"""The size that is tried next, by what failed and what fitted in how much memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from memopt._microbatch import size_cache
from memopt._microbatch.size_cache import KnownSizes, StepMemory

SHAPES = (((16,), "float32"),)
ROOM = 1000


def step(
    sizes: KnownSizes, samples: int, room: int, need: Callable[[int], int], shapes=SHAPES, counted=True
) -> list[int]:
    """As step.py goes on: the sizes that were tried, the last of them fits."""
    size = sizes.choose("f", shapes, samples, room)
    tried = [size]
    while need(size) > room:
        sizes.record("f", shapes).has_failed(size, room, 0)
        size = size // 2
        assert size
        tried.append(size)
    if not sizes.is_unlimited("f"):
        failed = len(tried) > 1
        taken = StepMemory(need(size), 0) if counted else None
        sizes.record("f", shapes).has_fitted(size, room, taken, failed)
    return tried


def test_what_fits_is_not_cut_and_leaves_no_record() -> None:
    sizes = KnownSizes()
    assert step(sizes, 64, ROOM, lambda n: n) == [64]
    assert sizes.is_unlimited("f")


def test_a_size_is_remembered() -> None:
    sizes = KnownSizes()
    assert step(sizes, 64, ROOM, lambda n: 50 * n) == [64, 32, 16]
    for samples in (64, 63, 32, 17):
        (size,) = step(sizes, samples, ROOM, lambda n: 50 * n)
        assert 8 < size <= 20
    assert step(sizes, 16, ROOM, lambda n: 50 * n) == [16]
    assert sizes.choose("g", SHAPES, 64, ROOM) == 64


def test_it_grows_back_with_room_and_not_without() -> None:
    sizes = KnownSizes()
    step(sizes, 64, ROOM, lambda n: 30 * n)
    for _ in range(3):
        assert step(sizes, 64, ROOM, lambda n: 30 * n)[0] == 32
    assert step(sizes, 64, 2 * ROOM, lambda n: 30 * n) == [64]
    assert len(step(sizes, 64, ROOM, lambda n: 30 * n)) <= 2


def test_a_failure_that_does_not_last_costs_one_step() -> None:
    sizes = KnownSizes()
    sizes.record("f", SHAPES).has_failed(64, ROOM, 10)
    sizes.record("f", SHAPES).has_fitted(32, ROOM, StepMemory(100, 0), True)
    assert sizes.choose("f", SHAPES, 64, ROOM) == 64  # twice 100, of 1000
    sizes.record("f", SHAPES).has_failed(64, ROOM, 10)  # the estimate was wrong: not again
    sizes.record("f", SHAPES).has_fitted(32, ROOM, StepMemory(100, 0), True)
    assert sizes.choose("f", SHAPES, 64, ROOM) < 64


def test_a_size_that_left_no_headroom_is_made_smaller() -> None:
    sizes = KnownSizes()
    step(sizes, 64, ROOM, lambda n: 31 * n)
    assert step(sizes, 64, ROOM, lambda n: 31 * n)[0] <= 24  # 32 took 992 of 1000


def test_a_size_at_which_the_allocator_thrashes_is_made_smaller() -> None:
    sizes = KnownSizes()
    step(sizes, 64, ROOM, lambda n: 20 * n)
    for _ in range(2):
        sizes.record("f", SHAPES).has_fitted(32, ROOM, StepMemory(640, 3), False)
    assert sizes.choose("f", SHAPES, 64, ROOM) <= 24


def test_shapes_are_known_apart_and_learn_from_each_other() -> None:
    sizes = KnownSizes()
    longer, shorter = (((32,), "float32"),), (((8,), "float32"),)
    step(sizes, 64, ROOM, lambda n: 30 * n)
    assert sizes.choose("f", longer, 64, ROOM) <= 32  # what is too much is too much of more
    assert sizes.choose("f", shorter, 64, ROOM) >= 32
    assert sizes.choose("f", (((8, 8), "float32"),), 64, ROOM) == 64  # of another form


def test_the_second_epoch_has_no_failure_whatever_the_first_was_like() -> None:
    for seed in range(300):
        choose = random.Random(seed)
        fixed, each = choose.randrange(100), choose.uniform(0.5, 60)
        lengths = [choose.randrange(1, 64) for _ in range(choose.randrange(1, 12))]
        batches = [(choose.randrange(1, 65), length, choose.choice([600, 1000, 1000])) for length in lengths]
        sizes = KnownSizes()
        for epoch in range(3):
            for samples, length, space in batches:
                shapes = (((length,), "float32"),)
                need = lambda n, k=length, f=fixed, e=each: int(f + e * n * k / 64)  # noqa: E731
                if need(1) > space:
                    continue
                tried = step(sizes, samples, space, need, shapes, counted=choose.random() < 0.7)
                assert epoch == 0 or len(tried) == 1, seed


def test_the_hosts_room_is_what_its_cgroup_has_left(monkeypatch):
    monkeypatch.setattr(size_cache, "available", lambda swap: None if swap else 5 << 20)
    assert size_cache.available_bytes([torch.device("cpu")]) == 5 << 20
