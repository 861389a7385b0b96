"""Costs of a chain, measured with a sample: each stage by itself, in its place in the model.

The model is run twice, for bytes and for seconds, with something else in its stages' places: it runs each forward and
backward by itself and then gives the output on without a graph, so that never more than one stage's saved set is there.
The graph of what is around the stages (an embedding before, the loss after) is made as ever, and measured too. Seconds
are the minimum of several runs of all stages that are alike; a device that runs asynchronously is synchronized before
and after each.

Stages that a schedule treats as one are measured one by one, and their costs joined (`group`)."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.runner import Held, StageCall, calls_of, held_outputs, unchangeable
from memopt._checkpoint.stages.argument_objects import ArgumentObject
from memopt._checkpoint.stages.costs import (
    Meter,
    Moments,
    StageBytes,
    StageSeconds,
    block_bytes,
    bytes_of,
    gradients_on,
    local,
    stage_bytes,
    stage_moments,
    tensors_in,
    workspace_bytes,
)
from memopt._checkpoint.stages.model_chain import repeatedly, without_graph
from memopt._checkpoint.stages.module_state import Changes, cut
from memopt._runtime import arguments, device_clock
from memopt.chain import Op

Loss = Callable[[Any], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def default_loss(out: Any) -> torch.Tensor:
    """The output's `loss`, or else the sum of its tensors that need a gradient."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    ends = [t for t in tensors_in(out) if t.requires_grad]
    if not ends:
        raise ValueError("no output of the model needs a gradient: there is nothing to checkpoint for")
    return torch.stack([t.sum() for t in ends]).sum()


def check_loss(value: Any) -> None:
    """Raise ValueError if loss= returned something else than a tensor of one number."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ValueError(
            f"loss= returned {arguments.shown(value)}{shape}: have it return one number, as lambda out: out.mean()"
        )


def untaken(size: StageBytes) -> StageBytes:
    """Return the sizes of a stage whose output the next one does not take: only the stage may keep it."""
    return size._replace(
        saved=size.saved if size.saves_output else size.saved_beside_output,
        output=0,
        forward_overhead=size.forward_overhead + (0 if size.saves_output else size.output),
        run_overhead=size.run_overhead + size.output,
    )


class Measurable(Protocol):
    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The function of each stage."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each stage."""

    @property
    def changing(self) -> Collection[int]:
        """The numbers of the stages that change their input in place."""

    @property
    def lingering(self) -> Sequence[int | None]:
        """For each stage another stage whose input its caller still holds, or None."""

    @property
    def norms(self) -> Sequence[Sequence[torch.nn.Module]]:
        """For each stage the modules whose running statistics are copied when it runs again."""

    @property
    def state(self) -> Sequence[Changes]:
        """For each stage what its runs change in modules."""

    @property
    def device(self) -> torch.device:
        """The device of the stages."""

    @property
    def standing(self) -> Sequence[torch.Tensor]:
        """Bytes allocated before and after a step."""

    @property
    def mapped(self) -> tuple[Sequence[torch.Tensor], int]:
        """Those of them in pages of a file, and the bytes of these pages that are in memory at once."""

    @property
    def trainable(self) -> Sequence[torch.Tensor]:
        """Tensors whose gradients a step makes and leaves."""

    def run(self, run: Callable[..., Any]) -> Any:
        """Run one forward pass, in which stage k is run(k, its arguments)."""


class ExternalGrad(NamedTuple):
    """The gradient of an argument that skips stages: it is there from the backward of the last stage that takes it to
    that of the stage that made it, or was the last before it was made; -1: none was."""

    storage: int
    taken_by: int
    made_by: int
    nbytes: int


class Crossing(NamedTuple):
    """A tensor that skips stages, from its making on. made_by: the stage before that. is_output: it is that stage's."""

    made_by: int
    nbytes: int
    is_output: bool


def made_before(changes: Changes) -> list[torch.Tensor]:
    """Tensors that hooks have made for a stage, with a graph: weights of their norms and directions."""
    values = [slot.get() for slot in changes]
    return [value for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None]


class ChainMeasurement:
    """Bytes and seconds of a chain's stages, and of what comes after the last.

    stage_bytes, stage_seconds: a list each, the last entry for what comes after the stages: the rest of the model, the
    loss. standing_bytes: parameters, buffers, the sample, and others: what else the operations of a step took that was
    there before, such as the loss's targets; of parameters in pages of a file only mapped_bytes. external_grads:
    gradients of arguments that are not the output of the stage before. input_bytes: of the first stage. held_bytes:
    what else lives from before the last stage to the backward pass, however the stages are run: saved around them, or
    an argument of one that is not the output of the stage before. crossing_bytes: of these the arguments that skip
    stages, each once, which a schedule could make again or offload; crossings: of them those that nothing around the
    stages saves, and that were not there before the first one. result_bytes: of what the model returns, the loss
    and its gradient, beside the last stage's output. workspace_bytes: cuBLAS's own.

    keeps_output: whether the caller holds what the model returns until the step is over. seconds: of each stage and of
    what comes after, where they are known already."""

    def __init__(
        self,
        chain: Measurable,
        loss: Loss,
        *,
        keeps_output: bool = True,
        seconds: Sequence[StageSeconds] | None = None,
    ) -> None:
        self.chain, self.loss, self.keeps_output = chain, loss, keeps_output
        self.functions = chain.functions
        self.trainable, self.standing = list(chain.trainable), list(chain.standing)
        self.device, (self.mapped, self.mapped_bytes) = chain.device, chain.mapped
        self.input_bytes = self.held_bytes = self.crossing_bytes = self.result_bytes = 0
        self.state_bytes = 0  # random states, which live beside the stages on a CPU
        self.returns_last = False  # the last stage's output is among what the model returns
        self.stage_bytes: list[StageBytes] = []
        self.stage_seconds: list[StageSeconds] = []
        self.linked_bytes: list[int] = []  # of each stage's input
        self.externals: list[torch.Tensor] = []
        self.crossing: list[torch.Tensor] = []
        self.outputs: list[Any] = []  # of the stage that ran last
        self.last_outputs: list[torch.Tensor] = []
        self.external_grads: list[ExternalGrad] = []
        self.crossings: list[Crossing] = []
        self.others: list[torch.UntypedStorage] = []
        torch.clear_autocast_cache()  # what finding the chain has left there
        self.made_before: list[torch.Tensor] = []  # of the stage that runs
        self.measure_bytes()
        self.standing_bytes = bytes_of(self.standing, self.mapped) + self.mapped_bytes
        self.standing_bytes += sum(block_bytes(one.nbytes(), one.device) for one in self.others)
        if seconds is None:
            self.measure_seconds()
        else:
            self.stage_seconds = list(seconds)
        self.workspace_bytes = workspace_bytes(self.device)

    def forward(self, stage: Callable[[int, StageCall, list[Held]], None], ended: Callable[[], None]) -> Any:
        """One forward pass: each stage is stage(), then gives its output on without a graph; after the last ended()."""

        def run(k: int, *args: Any, **kwargs: Any) -> Any:
            call = StageCall(args, kwargs, self.outputs, self.chain.state[k])
            linked = call.take_linked()
            self.made_before = made_before(self.chain.state[k])
            with call.state.again():
                stage(k, call, linked)
            self.clear_gradients()
            out = without_graph(self.functions[k], args, kwargs, self.chain.names[k])
            cut(self.chain.state[k], call.state.modules.tensors)
            self.last_outputs = [unchangeable(tensor) for tensor in tensors_in(out)]
            call.state.random.forget_unchanged()
            self.state_bytes += call.state.random.nbytes if self.device.type == "cpu" else 0
            call.note_outputs(out, held_outputs(self.functions[k]))
            self.outputs = call.outputs
            if k == len(self.functions) - 1:
                ended()
            return out

        for changes in self.chain.state:
            cut(changes)
        return self.chain.run(run)

    def note_externals(self, k: int, call: StageCall, made_by: dict[int, int]) -> None:
        """Note those of stage k's arguments that are not the output of the stage before.

        made_by: storage -> the stage that made it."""
        standing = {local(t).untyped_storage()._cdata for t in self.standing}
        for leaf in call.leaves:
            if isinstance(leaf, Held) and leaf.requires_grad and leaf.tensor.layout is torch.strided:
                identity = local(leaf.tensor).untyped_storage()._cdata
                if identity not in standing:
                    nbytes = block_bytes(local(leaf.tensor).nbytes, leaf.tensor.device)
                    self.external_grads.append(ExternalGrad(identity, k, made_by.get(identity, -1), nbytes))

    def crossings_of(
        self, made_by: Mapping[int, int], outputs_of: Mapping[int, int], kept: Sequence[torch.Tensor]
    ) -> list[Crossing]:
        """Return the tensors that skip stages, but for those that are kept anyway.

        made_by: storage -> the stage before it was made. outputs_of: storage -> the stage whose output it is.
        """
        others = {local(t).untyped_storage()._cdata for t in kept if t.layout is torch.strided}
        found = {}
        for tensor in self.crossing:
            if tensor.layout is torch.strided:
                storage = local(tensor).untyped_storage()
                identity, made = storage._cdata, made_by.get(storage._cdata, -1)
                if identity not in others and made >= 0:
                    nbytes = block_bytes(storage.nbytes(), storage.device)
                    found[identity] = Crossing(made, nbytes, outputs_of.get(identity) == made)
        return [*found.values()]

    def arguments(self, k: int, call: StageCall, linked: list[Held]) -> Callable[[], Arguments]:
        """Return a function that makes stage k's arguments anew for each separate run."""
        if k not in self.chain.changing:
            return lambda: call.arguments(linked)
        return lambda: call.arguments(
            [Held.of(held.tensor.clone(), held.requires_grad) for held in linked], changing=True
        )

    def gradient_bytes(self, made: list[torch.Tensor]) -> tuple[int, int]:
        """Return the bytes of the gradients of the parameters from which hooks made these tensors: after a backward
        pass through the hooks, and at its peak."""
        if not made:
            return 0, 0
        self.clear_gradients()
        meter = Meter(self.device)
        meter.ignore([*self.standing, *made])
        with meter:
            torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made], retain_graph=True)
            gradients = bytes_of(gradients_on(self.trainable, self.device))
        self.clear_gradients()
        return gradients, meter.peak

    def clear_gradients(self) -> None:
        for parameter in self.trainable:
            parameter.grad = None

    def measure_bytes(self) -> None:
        saved: list[torch.Tensor] = []  # around the stages
        meter = Meter(self.device)
        meter.ignore(self.standing)
        before_last = live = 0
        made_by: dict[int, int] = {}
        outputs_of: dict[int, int] = {}  # storage -> the stage whose output it is

        def stage(k: int, call: StageCall, linked: list[Held]) -> None:
            nonlocal made_by
            made_by = {identity: made_by.get(identity, k - 1) for identity in meter.known}
            self.note_externals(k, call, made_by)
            outputs_of.update({local(t).untyped_storage()._cdata: k - 1 for t in self.last_outputs})
            places = [place for place, _, _ in call.links]
            state = call.state.modules
            given = [leaf.tensor for leaf in call.leaves if isinstance(leaf, Held)]
            objects = [leaf for leaf in call.leaves if isinstance(leaf, ArgumentObject)]
            self.externals += [*given, *state.tensors, *(t for one in objects for t in one.tensors)]
            # What is computed between two stages makes the one's gradient of the other's, when its backward is over.
            between = 0
            is_part = self.chain.lingering[k] is not None  # of a block, and not the first: nothing is between
            if k and not places:
                between = 0 if is_part else self.stage_bytes[-1].output
                self.stage_bytes[-1] = untaken(self.stage_bytes[-1])
            if k == 0:
                self.input_bytes = bytes_of(given, self.standing)
            else:
                self.crossing += given

            def inputs(args: Any, kwargs: Any) -> list[torch.Tensor]:
                leaves = pytree.tree_leaves((args, kwargs))
                return [leaves[p] for p in places] if places or is_part else tensors_in(leaves)

            arguments = self.arguments(k, call, linked)
            with repeatedly(self.chain.names[k]):
                function = state.repeatable(self.functions[k])
                standing = [*self.standing, *state.tensors]
                # What its backward pass saves, for a graph of its own, is not around the stages.
                with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                    size = stage_bytes(function, arguments, inputs, standing, self.trainable, self.device)
            more = bytes_of([b for norm in self.chain.norms[k] for b in norm.buffers(recurse=False)])
            self.linked_bytes.append(bytes_of([held.tensor for held in linked]))
            if (first := self.chain.lingering[k]) is not None:
                more += self.linked_bytes[first]
            gradients, peak = self.gradient_bytes(self.made_before)
            self.stage_bytes.append(
                size._replace(
                    input_grad=size.input_grad + between,
                    backward_overhead=max(0, size.backward_overhead - between, size.parameter_grad + peak),
                    parameter_grad=size.parameter_grad + gradients,
                    forward_overhead=size.forward_overhead + more,
                    run_overhead=size.run_overhead + more,
                    remake_overhead=size.remake_overhead + more,
                )
            )

        def ended() -> None:
            nonlocal before_last, live
            before_last = len(saved)
            meter.ignore(self.last_outputs)
            live = meter.peak = meter.live

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        with meter, torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.detach):
                out = self.forward(stage, ended)
                value = self.loss(out)
                check_loss(value)
                # The loss is its caller's as well, and so is the gradient that the backward pass begins with.
                result = [*(tensors_in(out) if self.keeps_output else ()), value]
                beside = bytes_of(result, [*self.standing, *self.last_outputs])
                self.result_bytes = beside + value.nbytes
                self.returns_last = beside < bytes_of(result, self.standing)
                del out, result
            held = [*self.standing, *saved[:before_last], *self.externals]
            # A stage's numbers are there for as long as any graph of it: as if always.
            numbers = sum(size.numbers for size in self.stage_bytes)
            self.held_bytes = bytes_of(held, self.standing) + self.state_bytes + numbers
            self.crossing_bytes = bytes_of(self.crossing, self.standing)
            self.crossings = self.crossings_of(made_by, outputs_of, [*self.standing, *saved[:before_last]])
            kept = bytes_of([*saved[before_last:], value], [*held, *self.last_outputs])
            outputs = {local(t).untyped_storage()._cdata for t in self.last_outputs}
            saves_input = any(local(t).untyped_storage()._cdata in outputs for t in saved[before_last:])
            forward_overhead = max(0, meter.peak - live - kept)
            saved.clear()
            output = value.untyped_storage().nbytes()
            live = meter.peak = meter.live
            value.backward()
            input_grad = bytes_of([t.grad for t in self.last_outputs if t.grad is not None])
            made = bytes_of(gradients_on(self.trainable, self.device))
            backward_overhead = max(0, meter.peak - live - input_grad)
        self.stage_bytes.append(
            StageBytes(
                saved=max(kept, output),
                output=output,
                input_grad=input_grad,
                forward_overhead=forward_overhead,
                run_overhead=forward_overhead,
                remake_overhead=forward_overhead + output,
                backward_overhead=backward_overhead,
                parameter_grad=made,
                saved_count=0,
                saves_input=saves_input,
                saves_output=True,
                saved_beside_output=kept - output,
            )
        )
        del value, held
        self.forget()
        torch.clear_autocast_cache()
        if meter.live:
            gc.collect()
        self.others = meter.others()
        # The gradient that accumulates begins with the last stage in the forward pass's order.
        self.external_grads = list({found.storage: found for found in self.external_grads}.values())

    def measure_seconds(self) -> None:
        """Time each stage once in each of some forward passes, so that a disturbance meets one run of many stages."""
        clock, end = device_clock.clock, 0.0
        kinds = [
            kind_of(function, size) for function, size in zip(self.functions, self.stage_bytes, strict=False)
        ]
        first = {kind: k for k, kind in reversed([*enumerate(kinds)])}
        runs: defaultdict[Any, list[list[Moments]]] = defaultdict(list)

        def stage(k: int, call: StageCall, linked: list[Held]) -> None:
            if clock.exact and first[kinds[k]] != k:
                return
            count = self.stage_bytes[k].saved_count
            function = call.state.modules.repeatable(self.functions[k])
            with repeatedly(self.chain.names[k]):
                arguments = self.arguments(k, call, linked)
                runs[kinds[k]].append(stage_moments(function, arguments, self.trainable, count, self.device))

        def ended() -> None:
            nonlocal end
            end = clock.now(self.device)

        rest = []
        for _ in range(clock.repeats):
            with torch.enable_grad(), clock.running():
                value = self.loss(self.forward(stage, ended))
                between = clock.now(self.device)
                value.backward()
                rest.append([(end, between), (between, clock.now(self.device))])
            self.forget()

        def seconds(of: list[list[Moments]]) -> Iterator[float]:
            return (min(clock.between(*one) for one in column) for column in zip(*of, strict=True))

        forward, backward = seconds(rest)
        self.stage_seconds = [StageSeconds(*seconds(runs[kind])) for kind in kinds]
        self.stage_seconds.append(StageSeconds(forward, forward, forward, backward))

    def of_groups(self, groups: Sequence[range]) -> tuple[list[StageBytes], list[StageSeconds]]:
        """Return the costs of these groups of stages, each as one, and of everything after the last."""
        sizes = [group_bytes(self.stage_bytes[g.start : g.stop]) for g in groups]
        times = [group_seconds(self.stage_seconds[g.start : g.stop]) for g in groups]
        return [*sizes, self.stage_bytes[-1]], [*times, self.stage_seconds[-1]]

    def forget(self) -> None:
        self.externals, self.crossing, self.outputs, self.last_outputs, self.made_before = [], [], [], [], []
        self.clear_gradients()


def kind_of(function: Callable[..., Any], size: StageBytes) -> Any:
    """Return what stages have in common that take the same time: what they call, and all their bytes."""
    return (calls_of(function) or id(function)), size


# ---- groups of stages ------------------------------------------------------------------------------------------------


def group(sizes: Sequence[StageBytes]) -> list[range]:
    """Return the stages of each group, in order: those between which nothing is needed again.

    For memopt.chain a stage's saved set includes its output. Where neither the stage saves its output nor the next one
    its input (a normalization and its activation, a linear layer and its ReLU), the plain run frees that tensor, and a
    schedule that counts it counts too much. Such stages are one stage for the solver. Its operations are carried out on
    each of them, and what passes between is freed as soon as it has been used (ChainRunner's `passing`). A stage that
    changes its input in place is grouped with the one before, which alone can make that input again.
    """
    groups: list[range] = []
    for k, size in enumerate(sizes):
        if k and (size.changes_input or not (sizes[k - 1].saves_output or size.saves_input)):
            groups[-1] = range(groups[-1].start, k + 1)
        else:
            groups.append(range(k, k + 1))
    return groups


def group_bytes(members: Sequence[StageBytes]) -> StageBytes:
    """Return the sizes of a group as one stage."""
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
    most = late = made = 0
    coded = codable = sum(size.codable for size in members)
    for size, stays in zip(reversed(members), reversed(left), strict=True):
        most = max(most, stays + grad + size.input_grad + size.backward_overhead + made)
        late = max(late, stays - coded + grad + size.input_grad + size.late_overhead + made)
        coded -= size.codable
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
        output_stays=last.output_stays,
        codable=codable,
        codes=sum(size.codes for size in members),
        coding_overhead=max(size.coding_overhead for size in members),
        late_overhead=max(0, late - (kept - codable) - last.output - first.input_grad),
    )


def group_seconds(members: Sequence[StageSeconds]) -> StageSeconds:
    """Return the seconds of a group. A member before the last cannot stop early: the next one needs its output."""
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
        elif op.endswith("_input"):
            out.append((op, members.start))
        else:
            for k in reversed(members) if op in ("bwd", "fetch") else members:
                out.append((op, k, option[0]) if option else (op, k))
    return out


def passing(groups: Sequence[range]) -> set[int]:
    """Return the stages whose input only passes: every member of a group but its first."""
    return {k for members in groups for k in members if k != members.start}
