"""Lines that could have worked in place, and would have lowered the peak by it.

A line `x = x * 2` holds both tensors for a moment. If the old one dies right after the new one is born, nothing else
held it: no variable, no graph. In place there would have been one; the savings are reported where they are at the peak.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import torch

from memopt import _C
from memopt._memory.recording.recording import ACTIVATIONS, INPUTS, OTHER, Recording
from memopt._memory.recording.user_code import short_name, source_of, user_lines

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# They make a tensor of their argument's shape and type; with "_" behind the name, or in torch.nn.functional with
# inplace=True, they write to it.
_METHODS = frozenset("abs ceil clamp cos exp floor log neg relu round rsqrt sigmoid sin sqrt tanh".split())
_FUNCTIONAL = frozenset(
    "dropout elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu threshold".split()
)


@dataclass(frozen=True)
class InPlace:
    """An operation that could work in place. `saves`: bytes off the peak if `line` were written as `instead`."""

    line: str
    text: str
    instead: str
    saves: int

    def __str__(self) -> str:
        return f"-{_C.format_size(self.saves)} at the peak from {self.line} in place: `{self.instead}`"


def find(recording: Recording) -> list[InPlace]:
    """Return the operations that an in-place form would save, largest savings first; lines without a source file are
    left out."""
    frames, index = user_lines(recording.stacks)
    instead = [rewritten(source_of(frame)) if frame else "" for frame in frames]
    if not any(instead) or not recording.blocks:
        return []
    old, new = _overwritten(recording)
    of = torch.tensor(index)[recording.columns["stack"][new]]
    found = []
    for number in of.unique().tolist():
        frame, chosen = frames[number], of == number
        if frame is None or not instead[number]:
            continue
        saves = lowered(recording, old[chosen], recording.columns["born"][new[chosen]])
        if saves:
            found.append(InPlace(short_name(frame), source_of(frame), instead[number], saves))
    return sorted(found, key=lambda one: -one.saves)


def lowered(recording: Recording, blocks: torch.Tensor, since: torch.Tensor) -> int:
    """Return the bytes by which the peak would be lower if each of these blocks had died at the event `since`."""
    change = torch.zeros(recording.events + 2, dtype=torch.int64)
    size, died = recording.columns["size"][blocks], recording.columns["died"][blocks]
    change.index_add_(0, torch.minimum(since + 1, died + 1), -size)
    change.index_add_(0, died + 1, size)
    live = recording.live_bytes()
    return int(live.max() - (live + change[: recording.events + 1].cumsum(0)).max())


def _overwritten(recording: Recording) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of blocks of one size: the old one dies after the new one is born, and before any other is."""
    born, died, size, category = (recording.columns[name] for name in ("born", "died", "size", "category"))
    events = recording.events
    block_born = torch.full((events + 1,), -1, dtype=torch.int64)  # at an event, the block, or none
    inside = born >= 0
    block_born[born[inside]] = inside.nonzero().flatten()
    at = torch.arange(events + 1)
    last_birth = torch.where(block_born >= 0, at, -1).cummax(0).values
    old = (
        ((died < events) & torch.isin(category, torch.tensor((ACTIVATIONS, INPUTS, OTHER))))
        .nonzero()
        .flatten()
    )
    before = last_birth[died[old]]
    old, before = old[before >= 0], before[before >= 0]
    new = block_born[before]
    fits = (size[new] == size[old]) & (new != old) & (died[old] > before) & (born[old] < before)
    old, new = old[fits], new[fits]
    # Of two that died for one, one could have been written to.
    order = torch.argsort(new, stable=True)
    old, new = old[order], new[order]
    first = torch.ones(len(new), dtype=torch.bool)
    first[1:] = new[1:] != new[:-1]
    return old[first], new[first]


def rewritten(source: str) -> str:
    """Return the line in its in-place form, "" unless it is simple: `x = x * y`, `x = x.relu()`, `x = F.relu(x)`."""
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name):
        return ""
    name = target.id
    if isinstance(value, ast.BinOp) and type(value.op) in _OPERATORS and _is(value.left, name):
        if isinstance(value.right, ast.Name | ast.Constant | ast.Attribute):
            return f"{name} {_OPERATORS[type(value.op)]}= {ast.unparse(value.right)}"
        return ""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    if any(not isinstance(one, ast.Constant | ast.Name) for one in value.args) or value.keywords:
        return ""
    owner, function = value.func.value, value.func.attr
    given = ", ".join(map(ast.unparse, value.args))
    if _is(owner, name) and function in _METHODS:
        return f"{name}.{function}_({given})"
    if not value.args or not _is(value.args[0], name):
        return ""
    if _is(owner, "torch") and function in _METHODS:
        return f"torch.{function}_({given})"
    if _is(owner, "F") and function in _FUNCTIONAL:
        return f"{name} = F.{function}({given}, inplace=True)"
    return ""


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
