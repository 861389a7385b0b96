"""Parts of a forward as stages of a chain: a residual block's attention and its MLP, for instance.

A block is a stage whose module adds something of its own. Its forward is traced (trace_forward.py) and cut where,
besides the arguments that stay the same for all of it (masks, positions), only one tensor is needed from there on: the
residual stream between two branches. Parts that have no matrix of parameters (a norm, an activation) join the one
before. A block stays one stage if it cannot be traced, or if its parts do not reproduce its result on the sample bit
for bit.

The forward of a whole model whose modules form no chain (skips of a U-Net, sums in the model's own code, lists of
features) is traced too, modules opened, and cut where besides one tensor only *held* ones are needed: those that live
across many parts, which stay from the forward pass on (`held_values`).

A call that the trace is not valid for, with other shapes say, is traced again. Where it makes the same calls, these run
in the same parts. Else the block runs whole, as its first part, and the others pass on its result. Results therefore do
not depend on the trace; only the planned peak does.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.runner import Held, StageCall
from memopt._checkpoint.stages.costs import no_backward
from memopt._checkpoint.stages.module_state import Changes
from memopt._checkpoint.stages.trace_forward import (
    Arguments,
    Expected,
    ForwardTrace,
    RecordedCalls,
    TracedCall,
)
from memopt._offload.visits import at_home

Run = Callable[..., Any]  # of stage k: run(k, *args, **kwargs)
Visit = Callable[..., Any]  # visit(function, *args, **kwargs): the call, with offloaded parameters in place

SHORT = 32  # a life during which less than a part of so many is made is not worth holding a value for
MOST_HELD = 64
MOST_CUTS = 128  # of a model, above which parts without a matrix join the one before
MOST_TRACES = 64  # of a block, besides the one that it was planned with


class PartProgram(NamedTuple):
    """The steps from start to end as one part, which takes the values of these numbers; of each step, those that it is
    the last to use.

    makes: the numbers of its result, a tuple, unless it is the last part. ends: numbers that no later part takes.
    """

    start: int
    end: int
    inputs: list[int]
    unused: list[list[int]]
    makes: list[int]
    ends: list[int]

    def run(self, trace: BlockTrace, given: tuple[torch.Tensor, ...]) -> Any:
        values = dict(zip(self.inputs, given, strict=True))
        for step, unused in zip(trace.steps[self.start : self.end], self.unused, strict=True):
            step.run(values)
            for number in unused:
                del values[number]
        if self.end == len(trace.steps):
            return trace.result.fill(values)
        return tuple(values[number] for number in self.makes)


class BlockTrace:
    """The steps of a block and its result, for the arguments and the state that are expected.

    Among the arguments of a stage it is a single leaf, which is the same in later runs.
    """

    __slots__ = ("expected", "result", "steps")

    def __init__(self, recording: ForwardTrace) -> None:
        self.expected: Expected = recording.expected
        self.steps: list[TracedCall] = recording.steps
        self.result: Arguments = recording.result


class BlockPart:
    """One stage of a block.

    part(trace, its values …) runs its steps of that trace. part(None, args, kwargs) runs the whole block if it is the
    first part; part(None, out) passes on the block's result if it is not.
    """

    def __init__(self, block: SplitBlock, n: int) -> None:
        self.block, self.n = block, n
        self.visit: Visit = at_home
        own = block.programs[n]
        steps = block.trace.steps[own.start : own.end]
        self.modules_used = called_modules(steps)
        self.modules_called = self.modules_used if n else list(block.module.modules())
        later = {number for program in block.programs[n + 2 :] for number in program.inputs}
        self.held_outputs = {leaf for leaf, number in enumerate(own.makes) if number in later}

    @property
    def __self__(self) -> torch.nn.Module:
        return self.block.module

    @property
    def steps_called(self) -> tuple[Any, ...]:
        own = self.block.programs[self.n]
        targets = self.block.calls.targets[own.start : own.end]
        return tuple(
            tuple(map(type, target.modules())) if isinstance(target, torch.nn.Module) else target
            for target in targets
        )

    def __call__(self, trace: BlockTrace | None, *values: Any) -> Any:
        if trace is not None:
            return self.visit(self.block.programs[self.n].run, trace, values)
        if self.n:
            return values[0]
        args, kwargs = values
        return self.block.visit(self.block.forward, *args, **kwargs)

    def __repr__(self) -> str:
        block = self.block
        return f"<part {self.n + 1} of {len(block.parts)} of {block}>"


def called_modules(steps: Iterable[TracedCall]) -> list[torch.nn.Module]:
    """Return the modules that these steps call, those in them, and the owners of parameters and buffers they use."""
    found: dict[torch.nn.Module, None] = {}
    for step in steps:
        if isinstance(step.target, torch.nn.Module):
            found.update(dict.fromkeys(step.target.modules()))
        found.update((owner, None) for _, owner, _ in step.arguments.owned)
    return list(found)


class SplitBlock:
    """A module's forward as parts.

    names: of the modules that each part calls. whole: the module is the model. changes: what its runs change in
    modules. visit: brings its parameters, as each part's does the part's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        forward: Callable[..., Any],
        recording: ForwardTrace,
        programs: list[PartProgram],
        *,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        self.module, self.name, self.forward = module, name, forward
        self.trace = BlockTrace(recording)
        self.calls = RecordedCalls.of(recording)
        self.traces: OrderedDict[tuple[torch.Size, ...], tuple[Expected, BlockTrace | None]] = OrderedDict()
        self.programs = programs
        self.changes: Changes = {}
        self.visit: Visit = at_home
        self.places = {number: n for n, number in enumerate(recording.arguments) if number is not None}
        self.parts = [BlockPart(self, n) for n in range(len(programs))]
        self.warned = False
        known = {child: child_name for child_name, child in module.named_modules()}
        self.names = [
            [
                known[step.target]
                for step in self.trace.steps[program.start : program.end]
                if isinstance(step.target, torch.nn.Module) and step.target in known
            ]
            for program in programs
        ]

    def call(self, run: Run, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block, its parts being the stages from `first` on."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        trace: BlockTrace | None = self.trace
        if (difference := self.trace.expected.difference(leaves, spec)) is not None:
            trace = self.trace_for(args, kwargs, leaves, spec)
        if trace is None:
            self.warn(str(difference))
            result = run(first, None, args, kwargs)
            for n in range(1, len(self.programs)):
                result = run(first + n, None, result)
            return result
        values = {number: leaves[place] for number, place in self.places.items()}
        del leaves, args, kwargs
        out: Any = None
        for n, program in enumerate(self.programs):
            given = [values[number] for number in program.inputs]
            for number in program.ends:
                values.pop(number, None)
            out = run(first + n, trace, *given)
            del given
            if n < len(self.programs) - 1:
                values.update(zip(program.makes, out, strict=True))
                out = None
        return out

    def trace_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: pytree.TreeSpec
    ) -> BlockTrace | None:
        """Return a trace that is valid for these arguments and makes the planned one's calls, None if there is none."""
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        expected, trace = self.traces.get(shapes, (None, None))
        if expected is None or expected.difference(leaves, spec) is not None:
            recording = self.traced_again(args, kwargs)
            trace = BlockTrace(recording) if self.calls == RecordedCalls.of(recording) else None
            self.traces[shapes] = recording.expected, trace
            if len(self.traces) > MOST_TRACES:
                self.traces.popitem(last=False)
        self.traces.move_to_end(shapes)
        return trace

    def traced_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardTrace:
        """Run the block's forward for its trace alone: it changes nothing, and no graph holds anything."""
        call = StageCall(args, kwargs, (), self.changes)
        again, given = call.arguments(call.take_linked())
        recordings: list[ForwardTrace] = []

        def record() -> Any:
            recordings.append(ForwardTrace(self.module, self.forward, again, given, opens=self.whole))
            return recordings[0].out

        with batch_norm.kept(batch_norm.modules_in(self.module)):
            noted(call, lambda: self.visit(record))
        return recordings[0]

    def __str__(self) -> str:
        return f"{self.name or 'the model'}, a {type(self.module).__name__}"

    def warn(self, difference: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"memopt.auto_checkpoint: {self}, runs as one stage instead of "
                f"{len(self.parts)}, because {difference} since it was planned: results are correct, but the step's "
                "peak may exceed memory_budget. Call auto_checkpoint() again with the model as it is used now",
                stacklevel=2,
            )


class Lives:
    """The lives of a trace's values: the number of steps before each is made, and of those before its last use.

    streams: numbers of the arguments that are not available everywhere in the chain."""

    def __init__(self, recording: ForwardTrace, streams: set[int]) -> None:
        self.steps, self.nbytes, self.storages = recording.steps, recording.nbytes, recording.storages
        self.arguments = {number for number in recording.arguments if number is not None}
        self.streams = streams
        count = len(self.steps)
        self.made, self.last = dict.fromkeys(self.arguments, 0), dict.fromkeys(self.arguments, 0)
        for n, step in enumerate(self.steps):
            self.last.update((number, n) for _, number in step.arguments.uses)
            self.made.update((number, n + 1) for _, number in step.makes)
        self.last.update((number, count) for _, number in recording.result.uses)
        # A part must not change what another made: a second run would find it changed.
        self.changed = {
            at
            for n, numbers in recording.changes
            for at in range(min(self.made[number] for number in numbers), n + 1)
        }
        self.before = [0] * (count + 1)  # bytes that are made before each step, a storage once
        counted = {self.storages[number] for number in self.arguments}
        for n, step in enumerate(self.steps):
            made = {self.storages[v] for _, v in step.makes} - counted
            counted |= made
            self.before[n + 1] = self.before[n] + sum(self.nbytes[storage] for storage in made)

    def alive(self, numbers: Iterable[int]) -> list[int]:
        """Return how many of these values are needed after each number of steps."""
        change = [0] * (len(self.steps) + 2)
        for number in numbers:
            if number in self.last and self.made[number] <= self.last[number]:
                change[self.made[number]] += 1
                change[self.last[number] + 1] -= 1
        return list(accumulate(change))

    def cuts(self, held: set[int]) -> list[int]:
        """Return the numbers of steps after which besides `held` one value is needed, or none but these."""
        values = self.alive(set(self.last) - self.arguments - held)
        there, streams = self.alive(held), self.alive(self.streams)
        return [
            at
            for at in range(1, len(self.steps))
            if at not in self.changed
            and not streams[at]
            and (values[at] == 1 or (there[at] and not values[at]))
        ]

    def with_matrices(self, places: list[int]) -> list[int]:
        """Return those of these cuts that leave a matrix of parameters in each part."""
        has = [step.has_matrix for step in self.steps]
        ends = [*places[1:], len(has)]
        return [at for at, end in zip(places, ends, strict=False) if any(has[:at]) and any(has[at:end])]

    def largest_part(self, places: list[int]) -> int:
        ends = [*places, len(self.steps)]
        return max(self.before[end] - self.before[at] for at, end in zip([0, *places], ends, strict=True))


def held_values(lives: Lives) -> set[int]:
    """Return the values to hold across parts: those that live longest, as many as make the least memory.

    That is what they take and the largest part between the cuts that they allow, by the bytes of its results."""

    def span(number: int) -> int:
        return lives.before[lives.last[number]] - lives.before[lives.made[number]]

    least = lives.before[-1] // SHORT
    long = [number for number in set(lives.last) - lives.arguments if span(number) > least]
    long.sort(key=span, reverse=True)
    held: set[int] = set()
    best, lowest = set(held), lives.largest_part(lives.cuts(held))
    for number in long[:MOST_HELD]:
        held.add(number)
        nbytes = sum(lives.nbytes[storage] for storage in {lives.storages[one] for one in held})
        taken = nbytes + lives.largest_part(lives.cuts(held))
        if taken < lowest:
            best, lowest = set(held), taken
    return best


def part_programs(recording: ForwardTrace, lives: Lives, places: list[int]) -> list[PartProgram]:
    found = []
    starts, ends = [0, *places], [*places, len(recording.steps)]
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        steps = recording.steps[start:end]
        own = {number for step in steps for _, number in step.makes}
        makes: list[int] = []
        if n < len(places):
            makes = sorted(number for number in own if lives.last.get(number, -1) >= end)
        kept = set(makes) if n < len(places) else {number for _, number in recording.result.uses}
        uses = [{number for _, number in step.arguments.uses} for step in steps]
        inputs = sorted((set().union(*uses) | kept) - own)
        gone_after = [
            number for number in (*lives.arguments, *lives.last) if lives.last.get(number, -1) < end
        ]
        there, unused = set(inputs), []
        for i, step in enumerate(steps):
            there |= {number for _, number in step.makes}
            gone = there - kept - set().union(*uses[i + 1 :])
            unused.append(sorted(gone))
            there -= gone
        found.append(PartProgram(start, end, inputs, unused, makes, gone_after))
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
    module: torch.nn.Module,
    name: str,
    forward: Callable[..., Any],
    call: StageCall,
    linked: list[Held],
    *,
    whole: bool = False,
) -> SplitBlock | str:
    """Return the block as parts, or the reason why it cannot be split.

    linked: those of its arguments that the stage before returned. whole: it is the model, whose arguments are available
    everywhere.
    """
    args, kwargs = call.arguments(linked)
    recordings: list[ForwardTrace] = []

    def record() -> Any:
        recordings.append(ForwardTrace(module, forward, args, kwargs, opens=whole))
        return recordings[0].out

    first = noted(call, record)
    (recording,) = recordings
    if recording.refusal is not None:
        return recording.refusal
    streams: set[int | None] = set()
    if call.links:
        streams = {recording.arguments[place] for place, _, _ in call.links}
    elif not whole:  # the caller holds it, but it is cut as the blocks after it will be
        floating = [
            n
            for n, x in zip(recording.arguments, pytree.tree_leaves((args, kwargs)), strict=True)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        streams = set(floating[:1])
    lives = Lives(recording, {number for number in streams if number is not None})
    places = lives.cuts(held_values(lives) if whole else set())
    if not whole or len(places) >= MOST_CUTS:
        places = lives.with_matrices(places)
    if not places:
        return "it has no point at which a single tensor is all that the rest of it needs"
    block = SplitBlock(module, name, forward, recording, part_programs(recording, lives, places), whole=whole)
    args, kwargs = call.arguments(linked)
    second = noted(call, lambda: block.call(lambda k, *values: block.parts[k](*values), 0, args, kwargs))
    if not first.same(second):
        return "its parts, run separately, do not reproduce its results bit for bit"
    return block
