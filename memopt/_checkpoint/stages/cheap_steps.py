"""Saved tensors of a part that its cheap steps can make again: outputs of activations, norms and copies.

Between the products of a block stand steps that take a small part of its time and whose results are a large part of
what it saves: the input of a linear layer is a norm's or an activation's output. A stage's option SELECTIVE keeps what
products made and drops those results; before the stage's backward the cheap steps run again, from its arguments and
from what was kept. Which values are dropped is found with the sample, and verified there bit for bit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memopt._checkpoint.stages.trace_forward import PRODUCTS, TracedCall, has_matrix

if TYPE_CHECKING:
    from memopt._checkpoint.stages.split import BlockPart, BlockTrace

SELECTIVE = "selective"
LEAST_BYTES = 1024  # of a storage that is worth dropping
REPEATS = 3
# In names of torch's functions: those that take long, or that draw random numbers.
OTHERS = (
    "attention",
    "dropout",
    "rand",
    "bernoulli",
    "multinomial",
    "normal_",
    "lstm",
    "gru",
    "rnn",
    "fold",
    "pool",
)
MODULES = (
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.RReLU,
    torch.nn.RNNBase,
)


def is_cheap(step: TracedCall) -> bool:
    """Return whether the step is one of many that pass over memory once, and does the same when it runs again."""
    if isinstance(step.target, torch.nn.Module):
        inside = list(step.target.modules())
        return not has_matrix(step.target) and not any(
            isinstance(one, MODULES) or one._forward_hooks or one._forward_pre_hooks or one._buffers
            for one in inside
        )
    name = str(getattr(step.target, "__name__", ""))
    return not any(word in name for word in (*PRODUCTS, *OTHERS))


class Made(NamedTuple):
    """A value that a step made: its number, and its place in a storage."""

    number: int
    storage: weakref.ref[torch.UntypedStorage]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> Made:
        ref = weakref.ref(tensor.untyped_storage())
        return Made(number, ref, tensor.shape, tensor.stride(), tensor.storage_offset())


class ValueNotes:
    """The values that a run of a part makes, and of each storage the first of them."""

    def __init__(self) -> None:
        self.made: dict[int, Made] = {}
        self.first: dict[int, Made] = {}  # by the storage's address, which another one may get later

    def __call__(self, number: int, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        made = self.made[number] = Made.of(number, tensor)
        known = self.first.get(tensor.untyped_storage()._cdata)
        if known is None or known.storage() is not tensor.untyped_storage():
            self.first[tensor.untyped_storage()._cdata] = made

    def first_in(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the value that the tensor's storage was made for."""
        if tensor.layout is not torch.strided:
            return None
        known = self.first.get(tensor.untyped_storage()._cdata)
        return known.number if known is not None and known.storage() is tensor.untyped_storage() else None


class CheapSteps(NamedTuple):
    """What a part need not keep.

    dropped: numbers of values whose storages are dropped. steps: those that make them again, in order. needs: numbers
    of values that these take and that were kept, each with the number that its storage was made for.
    """

    dropped: frozenset[int]
    steps: list[int]
    needs: list[tuple[int, int]]

    def run(self, trace: BlockTrace, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the steps, from the part's inputs and what they need, and return the dropped values, made again."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda none: none):
            for at in self.steps:
                trace.steps[at].run(values)
        return {number: values[number].detach() for number in self.dropped}


def found_steps(
    part: BlockPart, trace: BlockTrace, notes: ValueNotes, saved: Iterable[int], results: Iterable[int]
) -> CheapSteps | None:
    """Return what the part need not keep of the storages that were made for these numbers; results: its result's."""
    program = part.block.programs[part.n]
    places = range(program.start, program.end)
    maker = {number: at for at in places for _, number in trace.steps[at].makes}
    takes = {at: [number for _, number in trace.steps[at].arguments.uses] for at in places}
    cheap = {at for at in places if is_cheap(trace.steps[at])}
    own = set(saved)
    kept = {number for number in own if maker[number] not in cheap} | (own & set(results))
    dropped: set[int] = set()
    needs: dict[int, int] = {}

    def steps_for(number: int, *, itself: bool = False) -> set[int] | None:
        """Return the steps that make a value again, None where it cannot be made again."""
        if number in program.inputs:
            return set()
        first = home.get(number)
        if first in kept and not itself:
            needs[number] = first
            return set()
        if (at := maker.get(number)) is None or at not in cheap:
            return None
        found = {at}
        for taken in takes[at]:
            if (more := steps_for(taken)) is None:
                return None
            found |= more
        return found

    home = {number: first for number, made in notes.made.items() if (first := homes(notes, made)) is not None}
    steps: set[int] = set()
    for number in sorted(own - kept):
        before = dict(needs)
        again = steps_for(number, itself=True)
        if again is None:
            needs = before
            kept.add(number)
        else:
            dropped.add(number)
            steps |= again
    return CheapSteps(frozenset(dropped), sorted(steps), sorted(needs.items())) if dropped else None


def homes(notes: ValueNotes, made: Made) -> int | None:
    storage = made.storage()
    known = None if storage is None else notes.first.get(storage._cdata)
    return None if known is None or known.storage() is not storage else known.number


class Measured(NamedTuple):
    """Bytes that a stage need not keep, and seconds to make them again."""

    nbytes: int
    seconds: float


def measure(
    function: Callable[..., Any],
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    standing: Sequence[torch.Tensor],
    synchronize: Callable[[], None],
) -> Measured:
    """Find what the stage need not keep, and note it in the part: nothing where it cannot be made again bit for bit."""
    from memopt._checkpoint.stages.split import BlockPart  # which needs the runner, and that this file

    nothing = Measured(0, 0.0)
    if not isinstance(function, BlockPart):
        return nothing
    function.cheap = None
    (trace, *given), _ = arguments()
    if trace is None or any(function.is_within(at) for at, _ in function.block.calls.changes):
        return nothing
    notes, saved = ValueNotes(), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.detach):
        out = function(trace, *given, note=notes)
    others = {x.untyped_storage()._cdata for x in (*standing, *given) if x.layout is torch.strided}
    storages = {
        number: tensor
        for tensor in saved
        if (number := notes.first_in(tensor)) is not None
        and tensor.untyped_storage()._cdata not in others
        and tensor.untyped_storage().nbytes() >= LEAST_BYTES
    }
    results = {
        n
        for x in torch.utils._pytree.tree_leaves(out)
        if torch.is_tensor(x) and (n := notes.first_in(x)) is not None
    }
    found = found_steps(function, trace, notes, storages, results)
    if found is None:
        return nothing
    values = function.given(given)
    for number, first in found.needs:
        made = notes.made[number]
        values[number] = storages[first].detach().as_strided(made.size, made.stride, made.offset)
    seconds = []
    for _ in range(REPEATS):
        random = torch.get_rng_state()
        synchronize()
        begun = time.perf_counter()
        again = found.run(trace, dict(values))
        synchronize()
        seconds.append(time.perf_counter() - begun)
    if not torch.equal(random, torch.get_rng_state()):
        return nothing
    for number, tensor in again.items():
        before = storages[number].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=before.device).set_(before)
        now = torch.empty(0, dtype=torch.uint8, device=before.device).set_(tensor.untyped_storage())
        if not torch.equal(flat, now):
            return nothing
    function.cheap = found
    return Measured(
        sum(storages[number].untyped_storage().nbytes() for number in found.dropped), min(seconds)
    )
