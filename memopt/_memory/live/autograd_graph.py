"""Tensors that the nodes of autograd's graphs have saved for the backward pass.

Nothing is unpacked. For a saved tensor whose hooks would recompute it (checkpointing) or fetch it (offloading), the
object that the pack hook returned is read, because that is what is alive. No lock is taken either: a node may be
inspected while it runs, in another thread or in this one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch


class GraphTensor(NamedTuple):
    """A tensor that a node keeps; `root` is the number of the tensor whose backward reaches the node."""

    tensor: torch.Tensor
    node: str
    root: int


class Walk:
    """A walk over all nodes that these tensors lead to.

    `saved` is filled first, each node once, by the first root that reaches it; `nodes[i]` counts the nodes that root i
    alone, or first, leads to. The walk stops after some seconds of this thread's CPU time: then `complete` is False.
    """

    def __init__(self, roots: Iterable[torch.Tensor], seconds: float = float("inf")) -> None:
        self.roots = list(roots)
        self.saved: list[GraphTensor] = []
        self.nodes: dict[int, int] = {}
        self.complete = True
        seen: set[Any] = set()
        end = time.thread_time() + seconds
        for number, root in enumerate(self.roots):
            stack, count = [root.grad_fn], 0
            while stack:
                node = stack.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                count += 1
                if count % 256 == 0 and time.thread_time() > end:
                    self.complete = False
                    break
                self.saved += [GraphTensor(tensor, node.name(), number) for tensor in saved_by(node)]
                stack.extend([following for following, _ in node.next_functions])
            self.nodes[number] = count
            if not self.complete:
                return


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that one node keeps; none once it has let them go."""
    kind: Any = type(node)
    for attribute in _attributes(kind):
        try:
            value = getattr(node, attribute)
        except RuntimeError:  # a backward pass has freed them
            continue
        yield from _kept(value)
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # ctx.x = …
        yield from (value for value in vars(node).values() if isinstance(value, torch.Tensor))


def nodes_of(tensor: torch.Tensor, most: int = 1_000_000) -> int:
    """Count the nodes of the graph behind a tensor, up to `most`."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack and len(seen) < most:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend([following for following, _ in node.next_functions])
    return len(seen)


@functools.cache
def _attributes(kind: type) -> tuple[str, ...]:
    """The names under which a kind of node has its saved tensors as they are kept."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _kept(value: Any) -> Iterator[torch.Tensor]:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        data = getattr(one, "data", None)  # of a SavedTensor: None once it is released
        if isinstance(data, torch.Tensor):
            yield data
        elif isinstance(data, (tuple, list)):  # what a pack hook gave, such as (device, the copy)
            yield from (part for part in data if isinstance(part, torch.Tensor))
