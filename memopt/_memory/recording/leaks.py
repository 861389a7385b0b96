"""Detection of leaks: lines whose blocks add up from step to step, blocks of an earlier step live at the peak, and
tensors whose autograd graph spans several steps: a sum of losses that was meant to be a number.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt import _C
from memopt._memory.recording import inplace_advice
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WORKSPACES,
    Frame,
    Recording,
)
from memopt._memory.recording.user_code import short_name, source_of, user_frame, user_lines

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class Leak:
    """A likely leak: `bytes` in `blocks`, allocated at `line`.

    `kind`: "grows", by `per_step` bytes a step; "kept", from a step before the one with the peak; "graph", a tensor
    with the graphs of many steps behind it. `holder`: the variable that leads to it, bound at the line `bound`, if they
    are known; `graph`: number of nodes of the autograd graph that it holds; `saves`: of "kept", the bytes by which the
    peak would be lower had it been freed at the end of its step.
    """

    kind: str
    line: str
    text: str
    bytes: int
    blocks: int
    per_step: int
    category: str
    holder: str = ""
    bound: str = ""
    graph: int = 0
    saves: int = 0

    def __str__(self) -> str:
        line = self.line or "an unknown line"
        if self.kind == "grows":
            said = f"+{_C.format_size(self.per_step)}/step from {line}"
        elif self.kind == "kept":
            said = f"{_C.format_size(self.bytes)} kept from an earlier step, from {line}"
        else:
            said = f"graphs of all steps kept by a tensor from {line}"
        if self.holder:
            said += f", held by `{self.holder}`" + (f" ({self.bound})" if self.bound else "")
        if self.graph > 1:
            said += f", with a graph of {self.graph} nodes: use .item() or .detach()"
        if self.saves:
            delete = f"`del {self.holder}`" if self.holder else "a `del`"
            size = _C.format_size(self.saves)
            said += f"; {delete} at the end of its step, if nothing needs it later: -{size} at the peak"
        return said


_SMALL = 0.01  # of the peak


def in_words(found: Sequence[Leak], peak: int) -> list[str]:
    """Return a line for each leak; several kept blocks of less than 1 % of the peak share one."""
    small = [leak for leak in found if leak.kind == "kept" and leak.bytes < _SMALL * peak]
    if len(small) < 2:
        return [*map(str, found)]
    size = _C.format_size(sum(leak.bytes for leak in small))
    lines = [leak.line or "an unknown line" for leak in small]
    rest = f" and {len(lines) - 2} more" if len(lines) > 2 else ""
    return [
        *(str(leak) for leak in found if leak not in small),
        f"{size} kept from an earlier step by {len(small)} lines of less than 1 % of the peak each: "
        f"{', '.join(lines[:2])}{rest}",
    ]


def find(recording: Recording) -> list[tuple[Leak, torch.Tensor]]:
    """Return leaks with the indices of their blocks, largest first.

    Parameters, gradients and optimizer states are no leaks, and neither is what only the last step has left. At least
    three steps are needed.
    """
    steps = torch.tensor([mark.event for mark in recording.marks if mark.kind == "step"], dtype=torch.int64)
    if len(steps) < _FEWEST_STEPS:
        return []
    born, died = recording.columns["born"], recording.columns["died"]
    unattributed = recording.columns["category"] > GRADIENTS
    unattributed &= recording.columns["category"] != OPTIMIZER
    workspace = torch.isin(recording.columns["size"], torch.tensor(WORKSPACES))
    unattributed &= ~(workspace & (recording.columns["category"] == OTHER))
    period = torch.searchsorted(steps, born)  # of a block, the step in which it was made, from 0
    period[born < 0] = -1
    frames, index = user_lines(recording.stacks)
    line = torch.tensor(index)[recording.columns["stack"]]

    # A line grows that has left something in two steps at least; the last step's is still in use.
    last = len(steps) - 2
    left = (unattributed & (died == recording.events) & (period >= 0) & (period <= last)).nonzero().flatten()
    pairs = torch.unique(line[left] * len(steps) + period[left]) // len(steps)
    in_steps = torch.bincount(pairs, minlength=len(frames))
    grown = left[in_steps[line[left]] >= 2]
    found = _of_lines(recording, grown, line, frames, period)

    # What lives at the peak of what came after the first step, and is of a step before.
    grows = torch.zeros(len(frames), dtype=torch.bool)
    grows[line[grown]] = True
    live = recording.live_bytes()
    after = int(steps[0]) + 1
    peak = after + int(live[after + 1 :].argmax()) if after < recording.events else -1
    if peak >= 0:
        now = int(torch.searchsorted(steps, torch.tensor(peak)))
        kept = unattributed & (born <= peak) & (died > peak) & (period >= 0) & (period < now) & ~grows[line]
        over = unattributed & (period >= 0) & (period <= last + 1)  # of a step that has ended
        over[over.clone()] = died[over] > steps[period[over]] + 1
        for leak, blocks in _of_lines(recording, kept.nonzero().flatten(), line, frames, None):
            # Another step's peak may be as high, with what that one has kept.
            same = (over & (line == line[blocks[0]])).nonzero().flatten()
            saves = inplace_advice.lowered(recording, same, steps[period[same]] + 1)
            found.append((replace(leak, saves=saves), blocks))
    return sorted(found, key=lambda pair: (pair[0].kind != "grows", -pair[0].bytes))


def _of_lines(
    recording: Recording,
    blocks: torch.Tensor,
    line: torch.Tensor,
    frames: list[Frame | None],
    period: torch.Tensor | None,
) -> list[tuple[Leak, torch.Tensor]]:
    """Return a leak for each line that has requested some of these blocks.

    With their periods it is one that grows, by the median of what a period has left: a first step's setup is no growth.
    """
    found = []
    for number in line[blocks].unique().tolist():
        chosen = blocks[line[blocks] == number]
        size = recording.columns["size"][chosen]
        total = int(size.sum())
        if not total:
            continue
        category = torch.zeros(len(CATEGORIES), dtype=torch.int64)
        category.index_add_(0, recording.columns["category"][chosen], size)
        frame = frames[number]
        leak = Leak(
            kind="kept" if period is None else "grows",
            line=short_name(frame) if frame else "",
            text=source_of(frame) if frame else "",
            bytes=total,
            blocks=len(chosen),
            per_step=0 if period is None else _middle(period[chosen], size),
            category=CATEGORIES[int(category.argmax())],
        )
        found.append((leak, chosen))
    return found


def _middle(period: torch.Tensor, size: torch.Tensor) -> int:
    sums = torch.zeros(int(period.max()) + 1, dtype=torch.int64).index_add_(0, period, size)
    return int(sums[sums > 0].median())


def with_holders(recording: Recording, found: list[tuple[Leak, torch.Tensor]]) -> list[Leak]:
    """Return the same leaks with their holders, which are searched among all live objects of this process.

    It is therefore right only while the memory at the recording's end is still alive. A holder of the graphs of several
    steps is a leak too, if a small one on the device. Takes some tenths of a second.
    """
    steps = sum(mark.kind == "step" for mark in recording.marks)
    if steps < _FEWEST_STEPS:
        return []
    from memopt._memory.live import live_tensors as live

    column = recording.columns["address"]
    addresses = [column[blocks].tolist() for _, blocks in found]
    graphs = {
        tensor.untyped_storage().data_ptr(): (tensor.nbytes, nodes)
        for tensor, nodes in find_long_graphs(steps, recording.device)
    }
    if not found and not graphs:
        return []
    holders = live.holders(recording.device, {*graphs, *(one for of in addresses for one in of)})
    named = []
    for (leak, _), of in zip(found, addresses, strict=True):
        names = [holders[one] for one in of if one in holders and holders[one].name]
        if names:
            most = max(names, key=lambda one: one.nbytes)
            text = live.any_element(most.name) if len(names) > 1 else most.name
            leak = replace(leak, holder=text, bound=most.where, graph=max(one.nodes for one in names))
        named.append(leak)
    known = {one for of in addresses for one in of}
    for address, (nbytes, nodes) in graphs.items():
        if address not in known and address in holders and holders[address].name:
            frame = _born_at(recording, address)
            named.append(
                Leak(
                    kind="graph",
                    line=short_name(frame) if frame else "",
                    text=source_of(frame) if frame else "",
                    bytes=nbytes,
                    blocks=1,
                    per_step=0,
                    category=CATEGORIES[ACTIVATIONS],
                    holder=holders[address].name,
                    bound=holders[address].where,
                    graph=nodes,
                )
            )
    return named


def _born_at(recording: Recording, address: int) -> Frame | None:
    """The line that asked for the block that lives there at the end."""
    there = (recording.columns["address"] == address) & (recording.columns["died"] == recording.events)
    blocks = there.nonzero().flatten().tolist()
    return user_frame(recording.stacks[int(recording.columns["stack"][blocks[-1]])]) if blocks else None


# ---- graphs of several steps -----------------------------------------------------------------------------------------


_MOST_NODES = 200_000  # nodes that are looked at behind one tensor


def find_long_graphs(steps: int, device: str) -> list[tuple[torch.Tensor, int]]:
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
    while stack and len(seen) < _MOST_NODES:
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
