"""`@pytest.mark.sampled(n)`: of a family of tests, n that MEMOPT_SEED draws are run, of several the first always; in
the long form all. A family is what the mark stands on: the cases of a parametrized test, or with `pytestmark` the tests
of a file; with family=, all that name it."""

from __future__ import annotations

import os
import random

import pytest

LEFT: pytest.StashKey[dict[str, tuple[int, int]]] = pytest.StashKey()


def family_of(item: pytest.Item) -> tuple[str, int] | None:
    """Its name, and how many of it are run."""
    for node, mark in item.iter_markers_with_node("sampled"):
        return mark.kwargs.get("family") or node.nodeid.partition("[")[0], mark.args[0]
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
            dropped += draw.sample(members[count > 1 :], len(members) - count)
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
