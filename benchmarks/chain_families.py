"""Random chains of stages, by family, as the solver's tests and its benchmark draw them: small whole numbers, so that
nothing is rounded; a large `unit` makes bytes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from memopt.chain import Chain, Stage


def plain(r: random.Random, n: int, *, overhead: int = 2, spread: int = 6, zero: float = 0.0) -> Chain:
    """Sizes and times that have nothing to do with each other."""
    stages = []
    for _ in range(n):
        output = r.randint(1, spread)
        forward = 0 if r.random() < zero else r.randint(1, 9)
        saved = output + r.randint(0, 8)
        of, ob = r.randint(0, overhead), r.randint(0, overhead)
        stages.append(Stage(saved, output, forward, 2 * forward, of, ob))
    return Chain(tuple(stages), r.randint(1, spread))


def attention_mlp(r: random.Random, n: int) -> Chain:
    """A transformer's halves, alternating."""
    stages = []
    for i in range(n):
        saved, forward = (7, 4) if i % 2 == 0 else (10, 6)
        stages.append(Stage(saved + r.randint(0, 1), 1, forward + r.randint(0, 1), 2 * forward, 1, 1))
    return Chain(tuple(stages), 1)


def conv_pyramid(r: random.Random, n: int) -> Chain:
    """Outputs that are halved every few stages, at about the same work."""
    stages, output = [], 2 ** (2 + n // 3)
    for i in range(n):
        if i and i % 3 == 0:
            output = max(1, output // 2)
        forward = r.randint(3, 5)
        stages.append(Stage(output * r.randint(2, 3), output, forward, 2 * forward, 0, output // 2))
    return Chain(tuple(stages), 2 ** (2 + n // 3))


def zero_cost(r: random.Random, n: int) -> Chain:
    """Two stages in five take no time: views, reshapes, slices."""
    return plain(r, n, zero=0.4)


def large_overheads(r: random.Random, n: int) -> Chain:
    return plain(r, n, overhead=8)


def very_unequal(r: random.Random, n: int) -> Chain:
    """Sizes and times over two orders of magnitude."""
    stages = []
    for _ in range(n):
        output, forward = round(2 ** r.uniform(0, 6)), round(2 ** r.uniform(0, 6))
        saved = output + round(2 ** r.uniform(0, 6))
        stages.append(Stage(saved, output, forward, 2 * forward, r.randint(0, 4), r.randint(0, 4)))
    return Chain(tuple(stages), round(2 ** r.uniform(0, 6)))


def early_stop(r: random.Random, n: int) -> Chain:
    """A forward right before its backward takes less; but not the loss's, whose output is wanted."""
    chain = plain(r, n)
    stages = [
        replace(s, remake_seconds=s.forward_seconds * r.choice((0.5, 0.75, 1.0))) for s in chain.stages[:-1]
    ]
    return Chain((*stages, chain.stages[-1]), chain.input_bytes)


def other_gradients(r: random.Random, n: int) -> Chain:
    """Gradients that are not as large as what they are of: another type, or none."""
    chain = plain(r, n)
    stages = [replace(s, input_grad_bytes=r.randint(0, 8)) for s in chain.stages]
    return Chain(tuple(stages), chain.input_bytes, r.randint(0, 8))


FAMILIES: dict[str, Callable[[random.Random, int], Chain]] = {
    "random": plain,
    "attention/MLP": attention_mlp,
    "conv pyramid": conv_pyramid,
    "zero-cost stages": zero_cost,
    "large overheads": large_overheads,
    "very unequal": very_unequal,
    "early stop": early_stop,
    "other gradients": other_gradients,
}

IRREGULAR = ("random", "zero-cost stages", "large overheads", "very unequal", "early stop", "other gradients")


def with_options(r: random.Random, chain: Chain, count: int) -> Chain:
    """The same chain with `count` ways a stage: its own, and offloads or selective recomputation."""
    stages = []
    for stage in chain.stages:
        for k in range(1, count):
            part = r.randint(0, stage.saved_bytes - stage.output_bytes)
            if r.random() < 0.5:
                stage = stage.with_offload(part, r.uniform(0.5, 2.0), name=f"offload{k}")
            else:
                stage = stage.with_selective(part, r.randint(0, 3), name=f"selective{k}")
        stages.append(stage)
    return Chain(tuple(stages), chain.input_bytes, chain.output_grad_bytes)


def with_inputs_put_away(r: random.Random, chain: Chain) -> Chain:
    """The same chain, in which some inputs can be put off the device."""
    stages = [
        replace(s, put_input_seconds=r.randint(0, 1), get_input_seconds=r.randint(0, 3))
        if r.random() < 0.7
        else s
        for s in chain.stages
    ]
    return Chain(tuple(stages), chain.input_bytes, chain.output_grad_bytes)


def in_units(chain: Chain, unit: int) -> Chain:
    """Every size times `unit`."""
    stages = [
        Stage(
            s.saved_bytes * unit,
            s.output_bytes * unit,
            s.forward_seconds,
            s.backward_seconds,
            s.forward_overhead_bytes * unit,
            s.backward_overhead_bytes * unit,
            s.remake_seconds,
            None if s.input_grad_bytes is None else s.input_grad_bytes * unit,
        )
        for s in chain.stages
    ]
    grad = None if chain.output_grad_bytes is None else chain.output_grad_bytes * unit
    return Chain(tuple(stages), chain.input_bytes * unit, grad)
