"""Parts of a block as stages of a chain: a residual block's attention and its MLP, for instance.

A block is a stage whose module adds something of its own. Its forward is traced (trace_forward.py) and cut where,
besides the arguments that stay the same for all of it (masks, positions), only one tensor is needed from there on: the
residual stream between two branches. Parts that have no matrix of parameters (a norm, an activation) join the one
before. A block stays one stage if it cannot be traced, or if its parts do not reproduce its result on the sample bit
for bit.

A call that differs from the trace runs the block whole, as its first part; the others then pass on its result. Results
therefore do not depend on the trace; only the planned peak does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.runner import Held, StageCall
from memopt._checkpoint.stages.costs import no_backward
from memopt._checkpoint.stages.trace_forward import Arguments, Expected, ForwardTrace, TracedCall

Run = Callable[..., Any]  # of stage k: run(k, *args, **kwargs)


class PartProgram(NamedTuple):
    """The steps of one part, which takes the values of these numbers, and what each of them is the last to use."""

    inputs: list[int]
    steps: list[TracedCall]
    unused: list[list[int]]
    result: Arguments

    def run(self, given: tuple[torch.Tensor, ...]) -> Any:
        values = dict(zip(self.inputs, given, strict=True))
        for step, unused in zip(self.steps, self.unused, strict=True):
            step.run(values)
            for number in unused:
                del values[number]
        return self.result.fill(values)


class BlockPart:
    """One stage of a block.

    part(True, its values …) runs its steps. part(False, args, kwargs) runs the whole block if it is the first part;
    part(False, out) passes on the block's result if it is not.
    """

    def __init__(self, block: SplitBlock, n: int) -> None:
        self.block, self.n = block, n

    @property
    def __self__(self) -> torch.nn.Module:
        return self.block.module

    def __call__(self, as_recorded: bool, *values: Any) -> Any:
        if as_recorded:
            return self.block.programs[self.n].run(values)
        if self.n:
            return values[0]
        args, kwargs = values
        return self.block.forward(*args, **kwargs)

    def __repr__(self) -> str:
        block = self.block
        return f"<part {self.n + 1} of {len(block.parts)} of {block.name}, a {type(block.module).__name__}>"


class SplitBlock:
    """A module's forward as parts. names: of the modules that each part calls."""

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        forward: Callable[..., Any],
        recording: ForwardTrace,
        programs: list[PartProgram],
    ) -> None:
        self.module, self.name, self.forward = module, name, forward
        self.expected: Expected = recording.expected
        self.programs = programs
        self.places = {number: n for n, number in enumerate(recording.arguments) if number is not None}
        self.parts = [BlockPart(self, n) for n in range(len(programs))]
        self.warned = False
        known = {child: child_name for child_name, child in module.named_modules()}
        self.names = [
            [known[s.target] for s in p.steps if isinstance(s.target, torch.nn.Module) and s.target in known]
            for p in programs
        ]

    def call(self, run: Run, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block, its parts being the stages from `first` on."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if (difference := self.expected.difference(leaves, spec)) is not None:
            self.warn(difference)
            out = run(first, False, args, kwargs)
            for n in range(1, len(self.programs)):
                out = run(first + n, False, out)
            return out
        value: Any = None
        for n, program in enumerate(self.programs):
            given = [value if n and i == 0 else leaves[self.places[k]] for i, k in enumerate(program.inputs)]
            value = None
            value = run(first + n, True, *given)
            del given
        return value

    def warn(self, difference: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"memopt.auto_checkpoint: {self.name}, a {type(self.module).__name__}, runs as one stage instead of "
                f"{len(self.parts)}, because {difference} since it was planned: results are correct, but the step's "
                "peak may exceed memory_budget. Call auto_checkpoint() again with the model as it is used now",
                stacklevel=2,
            )


def cuts(recording: ForwardTrace, streams: set[int]) -> list[tuple[int, int]]:
    """Return the places where the recording can be cut: (steps before, the one value needed after).

    streams: numbers of the arguments that are not available everywhere in the chain.
    """
    steps, arguments = recording.steps, {number for number in recording.arguments if number is not None}
    made, last = dict.fromkeys(arguments, 0), dict.fromkeys(arguments, 0)
    for n, step in enumerate(steps):
        last.update((number, n) for _, number in step.arguments.uses)
        made.update((number, n + 1) for _, number in step.makes)
    last.update((number, len(steps)) for _, number in recording.result.uses)
    # A part must not change what another made: a second run would find it changed.
    changed = {
        at for n, numbers in recording.changes for at in range(min(made[number] for number in numbers), n + 1)
    }
    found = []
    for at in range(1, len(steps)):
        live = [v for v, n in last.items() if made[v] <= at <= n and (v in streams or v not in arguments)]
        if at not in changed and len(live) == 1 and live[0] not in arguments:
            found.append((at, live[0]))
    return found


def worth(recording: ForwardTrace, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of these cuts that leave a matrix of parameters in each part."""
    has = [step.has_matrix for step in recording.steps]
    ends = [*(at for at, _ in places[1:]), len(has)]
    kept = [
        (at, value)
        for (at, value), end in zip(places, ends, strict=False)
        if any(has[:at]) and any(has[at:end])
    ]
    return kept


def programs(recording: ForwardTrace, places: list[tuple[int, int]]) -> list[PartProgram]:
    found = []
    starts, ends = [0, *(at for at, _ in places)], [*(at for at, _ in places), len(recording.steps)]
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        steps = recording.steps[start:end]
        if n < len(places):
            value = places[n][1]
            result = Arguments([None], [(0, value)], [], pytree.tree_structure(0))
        else:
            result = recording.result
        own = {number for step in steps for _, number in step.makes}
        kept = {number for _, number in result.uses}
        uses = [{number for _, number in step.arguments.uses} for step in steps]
        needed = (set().union(*uses) | kept) - own
        inputs = sorted(needed)
        if n:  # what the part before made comes first
            inputs.remove(places[n - 1][1])
            inputs.insert(0, places[n - 1][1])
        there, unused = set(inputs), []
        for i, step in enumerate(steps):
            there |= {number for _, number in step.makes}
            gone = there - kept - set().union(*uses[i + 1 :])
            unused.append(sorted(gone))
            there -= gone
        found.append(PartProgram(inputs, steps, unused, result))
    return found


class Noted(NamedTuple):
    """Observable effects of a run: saved tensors, random states, outputs."""

    saved: list[tuple[Any, ...]]
    random: list[torch.Tensor]
    leaves: list[Any]
    spec: pytree.TreeSpec

    def same(self, other: Noted) -> bool:
        def equal(a: Any, b: Any) -> bool:
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                return a.is_meta == b.is_meta and (
                    a.shape == b.shape if a.is_meta else bool(torch.equal(a.cpu(), b.cpu()))
                )
            return type(a) is type(b) and bool(a == b)

        return (
            self.saved == other.saved
            and self.spec == other.spec
            and all(map(equal, self.random, other.random))
            and all(map(equal, self.leaves, other.leaves))
        )


def noted(call: StageCall, run: Callable[[], Any]) -> Noted:
    """Run it in the stage's execution state, with a graph that holds nothing."""
    saved: list[tuple[Any, ...]] = []

    def pack(tensor: torch.Tensor) -> None:
        saved.append((tensor.shape, tensor.dtype, tensor.device))

    with call.state.again(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, no_backward):
        leaves, spec = pytree.tree_flatten(run())
        random = call.state.random.present()
    return Noted(saved, random, leaves, spec)


def split(
    module: torch.nn.Module, name: str, forward: Callable[..., Any], call: StageCall, linked: list[Held]
) -> SplitBlock | str:
    """Return the block as parts, or the reason why it cannot be split.

    linked: those of its arguments that the stage before returned.
    """
    args, kwargs = call.arguments(linked)
    recordings: list[ForwardTrace] = []

    def record() -> Any:
        recordings.append(ForwardTrace(module, forward, args, kwargs))
        return recordings[0].out

    first = noted(call, record)
    (recording,) = recordings
    if recording.refusal is not None:
        return recording.refusal
    if call.links:
        streams = {recording.arguments[place] for place, _, _ in call.links}
    else:  # the caller holds it, but it is cut as the blocks after it will be
        floating = [
            n
            for n, x in zip(recording.arguments, pytree.tree_leaves((args, kwargs)), strict=True)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        streams = set(floating[:1])
    places = worth(recording, cuts(recording, {number for number in streams if number is not None}))
    if not places:
        return "it has no point at which a single tensor is all that the rest of it needs"
    block = SplitBlock(module, name, forward, recording, programs(recording, places))
    args, kwargs = call.arguments(linked)
    second = noted(call, lambda: block.call(lambda k, *values: block.parts[k](*values), 0, args, kwargs))
    if not first.same(second):
        return "its parts, run separately, do not reproduce its results bit for bit"
    return block
