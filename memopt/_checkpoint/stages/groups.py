"""Stages that a schedule treats as one, because what passes between them is not needed again.

For memopt.chain a stage's saved set includes its output. Where neither the stage saves its output nor the next one its
input (a normalization and its activation, a linear layer and its ReLU), the plain run frees that tensor, and a schedule
that counts it counts too much. Such stages are one stage for the solver. Its operations are carried out on each of
them, and what passes between is freed as soon as it has been used (ChainRunner's `passing`). A stage that changes its
input in place is grouped with the one before, which alone can make that input again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memopt._checkpoint.stages.costs import StageBytes, StageSeconds
from memopt.chain import Op


def group(sizes: Sequence[StageBytes]) -> list[range]:
    """The stages of each group, in order."""
    groups: list[range] = []
    for k, size in enumerate(sizes):
        if k and (size.changes_input or not (sizes[k - 1].saves_output or size.saves_input)):
            groups[-1] = range(groups[-1].start, k + 1)
        else:
            groups.append(range(k, k + 1))
    return groups


def group_bytes(members: Sequence[StageBytes]) -> StageBytes:
    """The sizes of a group as one stage."""
    if len(members) == 1:
        return members[0]
    kept = passing = 0  # bytes that stay, and the output of the member before
    peak = remake_peak = without_graph = 0
    left = []  # what stays of the members up to each
    for n, size in enumerate(members):
        if size.changes_input:
            passing = 0  # it is counted as its own
        in_full = kept + passing + size.saved + size.forward_overhead
        ended = kept + passing + size.saved_beside_output + size.remake_overhead
        peak = max(peak, in_full)
        remake_peak = max(remake_peak, ended if n == len(members) - 1 else in_full)
        without_graph = max(without_graph, passing + size.output + size.run_overhead)
        kept += size.saved if n == len(members) - 1 else size.saved_beside_output
        passing = size.output
        left.append(kept)
    first, last = members[0], members[-1]
    grad = last.output  # of the output, which the schedule counts
    most = made = 0
    for size, stays in zip(reversed(members), reversed(left), strict=True):
        most = max(most, stays + grad + size.input_grad + size.backward_overhead + made)
        grad = size.input_grad
        made += size.parameter_grad
    return StageBytes(
        saved=kept,
        output=last.output,
        input_grad=first.input_grad,
        forward_overhead=peak - kept,
        run_overhead=without_graph - last.output,
        remake_overhead=max(0, remake_peak - (kept - last.saved + last.saved_beside_output)),
        backward_overhead=max(0, most - kept - last.output - first.input_grad),
        parameter_grad=sum(size.parameter_grad for size in members),
        saved_count=sum(size.saved_count for size in members),
        saves_input=first.saves_input,
        saves_output=last.saves_output,
        saved_beside_output=kept - last.saved + last.saved_beside_output,
        movable=sum(size.movable for size in members),
        movable_room=sum(size.movable_room for size in members),
    )


def group_seconds(members: Sequence[StageSeconds]) -> StageSeconds:
    """A member before the last cannot end early: the next one needs its output."""
    return StageSeconds(
        forward=sum(t.forward for t in members),
        full_forward=sum(t.full_forward for t in members),
        remake=sum(t.full_forward for t in members[:-1]) + members[-1].remake,
        backward=sum(t.backward for t in members),
    )


def expand(ops: Iterable[Op], groups: Sequence[range]) -> list[Op]:
    """Return operations on groups as operations on their stages. Numbers beyond the groups' are of what comes after."""
    count = groups[-1].stop
    out: list[Op] = []
    for op, g, *option in ops:
        if g >= len(groups):
            out.append((op, count + g - len(groups)))
            continue
        members = groups[g]
        if op == "fck":
            out += [("fck" if k == members.start else "fnone", k) for k in members]
        elif op == "drop_input":
            out.append((op, members.start))
        else:
            for k in reversed(members) if op in ("bwd", "fetch") else members:
                out.append((op, k, option[0]) if option else (op, k))
    return out


def passing(groups: Sequence[range]) -> set[int]:
    """Return the stages whose input only passes: every member of a group but its first."""
    return {k for members in groups for k in members if k != members.start}
