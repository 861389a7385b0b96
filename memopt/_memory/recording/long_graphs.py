"""Tensors whose autograd graph spans several steps: a sum of losses that was meant to be a number."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch

_MOST = 200_000  # nodes that are looked at behind one tensor


def find(steps: int, device: str) -> list[tuple[torch.Tensor, int]]:
    """Return live tensors on a device whose graph spans several steps, with the number of nodes of that graph.

    In such a graph each parameter is reached in at least three ways, and in about as many as there were steps. A loss
    reaches at least one of its parameters in one way.
    """
    found = []
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.grad_fn is not None and str(thing.device) == device:
            ways, nodes = _ways(thing)
            if ways >= max(3, steps - 1):
                found.append((thing, nodes))
    return found


def _ways(tensor: torch.Tensor) -> tuple[int, int]:
    """The least number of edges into a leaf's node, over all leaves behind a tensor; and how many nodes there are."""
    into: Counter[Any] = Counter()
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack and len(seen) < _MOST:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                if hasattr(following, "variable"):  # AccumulateGrad
                    into[following] += 1
                stack.append(following)
    return min(into.values(), default=0), len(seen)
