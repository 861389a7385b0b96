"""`@pytest.mark.sampled(n)`: of a family of tests, n that MEMOPT_SEED draws are run, of several the first always; in
the long form all. A family is what the mark stands on: the cases of a parametrized test, or with `pytestmark` the tests
of a file. One that several files have is named instead, in FAMILIES."""

from __future__ import annotations

import os
import random

import pytest

# How many are run of each: mostly tests that take whole processes, and so most of the time that all tests take.
FAMILIES = {
    "estimates as processes": 8,
    "faults that gpu-check finds": 5,
    "forged files": 2,
    "kernels by NVIDIA's compilers": 2,
    "other libraries": 2,
    "processes that end": 5,
    "programs of the documentation": 3,
    "runs of estimates": 2,
    "scripts under `memopt run`": 7,
    "several processes": 3,
    "the doctor's screens": 2,
    "waits that a step needs": 4,
    "what fails while states are on a disk": 3,
    "whole benchmarks": 1,
}
LEFT: pytest.StashKey[dict[str, tuple[int, int]]] = pytest.StashKey()


def family_of(item: pytest.Item) -> tuple[str, int] | None:
    """Its name, and how many of it are run."""
    for node, mark in item.iter_markers_with_node("sampled"):
        (which,) = mark.args
        if isinstance(which, str):
            return which, FAMILIES[which]
        return mark.kwargs.get("family") or node.nodeid.partition("[")[0], which
    return None


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes from the items those that are left to the long form, whose numbers go to the stash. Depends on the seed and
    the names alone: all workers of a run draw the same."""
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if family := family_of(item):
            families.setdefault(family, []).append(item)
    left: dict[str, tuple[int, int]] = {}
    dropped: list[pytest.Item] = []
    for (name, count), members in families.items():
        if len(members) > count:
            draw = random.Random(f"{os.environ['MEMOPT_SEED']} {name}")
            first_always = count > 1 and name not in FAMILIES
            dropped += draw.sample(members[first_always:], len(members) - count)
            left[name] = len(members) - count, len(members)
    config.stash[LEFT] = left
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def summary(left: dict[str, tuple[int, int]]) -> str:
    """A line for the run's end; empty where nothing is left."""
    named = ", ".join(f"{name.rpartition('/')[2]} {few} of {all_}" for name, (few, all_) in left.items())
    return f"left to `make soak`: {sum(few for few, _ in left.values())} tests: {named}" if left else ""
