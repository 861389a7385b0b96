"""A model as a chain of stages: modules, or parts of them, each called on the output of the one before.

The chain is found by watching one forward pass. The calls of a module's children fall into runs, in which each takes,
unchanged, a tensor that the one before returned. A child is split into its own children where they carry its whole work
from its input to its output (an nn.Sequential, a stage of a ResNet). A child that adds something of its own (a residual
block) is a stage, and so is one in which something bypasses a child: it would be held however the children were run. A
module that is called more than once in a pass is never a stage, because its calls could not be told apart. One that
changes its argument in place is a stage only behind the one that made it, with which it runs again.

A second pass cuts blocks into parts where it can (split.py), and sees what each stage changes in modules. Where the
stages are no chain (`is_tangled`), a third one cuts the model's own forward instead; if that cannot be traced, a module
that is too large a part of the model is its children after all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.runner import StageCall, TensorVersion, changeable
from memopt._checkpoint.stages.costs import GraphIsGone, device_of, tensors_in
from memopt._checkpoint.stages.module_forwards import forwards, is_its_classes, own_forward
from memopt._checkpoint.stages.module_state import Changes, Snapshot, changes_within, joined
from memopt._checkpoint.stages.ranks import is_sharded
from memopt._checkpoint.stages.split import Run, SplitBlock, split
from memopt._offload.visits import Visit, VisitingStage, at_home, mapped_bytes, residency_of

PART = 0.5  # of a call's elements that the stages in it must make for these to stand for it
TANGLED = 2  # stages that take nothing from the one before, for the model's forward to be cut as one
LARGE = 0.4  # of the elements that a model makes, for a stage
MOST_STAGES = 256  # that blocks are split up to: the solver's time grows with the cube of their number


class Call:
    """A module's call, and those that its forward made."""

    def __init__(self, module: torch.nn.Module, name: str, parent: Call | None) -> None:
        self.module, self.name, self.parent = module, name, parent
        self.children: list[Call] = []
        self.before: Call | None = None  # the sibling called before, where it takes an output of that
        # Takes what its parent did from the one before, or a sibling earlier than that made.
        self.skips = False
        self.changes = False  # something it was given, in place
        self.changes_stream = False  # nothing but what the one before made
        self.takes_parents = False  # takes an argument of its parent
        self.defers = False  # returns logits that its caller's loss computes in parts
        self.passes = False  # the parent returned what the last of the children did
        self.inputs: list[TensorVersion] = []
        self.outputs: list[TensorVersion] = []
        self.elements = 0  # of its outputs and of those of the calls in it

    @property
    def linked(self) -> bool:
        return self.before is not None

    def source(self) -> Call | None:
        """Return the call whose output this call, or the outermost call that begins with it, takes."""
        call: Call | None = self
        while call is not None and call.before is None:
            first = call.parent is not None and call.parent.children[0] is call and call.takes_parents
            call = call.parent if first else None
        return call.before if call is not None else None

    def follows(self, other: Call) -> bool:
        """Return whether this call's source is `other`, or a call that `other` ends with."""
        source, inner = self.source(), other
        while inner is not source and inner.parent is not None and inner.parent.children[-1] is inner:
            inner = inner.parent
        return source is inner

    def runs(self) -> Iterator[list[Call]]:
        run: list[Call] = []
        for child in self.children:
            if run and not child.linked:
                yield run
                run = []
            run.append(child)
        if run:
            yield run


def is_deferred(value: Any) -> bool:
    """Return whether a value is memopt.nn's DeferredLogits, whose import takes tens of MiB."""
    return getattr(type(value), "is_deferred", False)


def seen(value: Any) -> list[TensorVersion]:
    """Return the tensors in a value; logits that are deferred are none yet."""
    return [
        TensorVersion.of(leaf)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and not is_deferred(leaf)
    ]


def keys(tensors: Iterable[TensorVersion]) -> set[tuple[int, int]]:
    return {key for tensor in tensors if (key := tensor.key()) is not None}


def meet(a: Iterable[TensorVersion], b: Iterable[TensorVersion]) -> bool:
    return not keys(a).isdisjoint(keys(b))


def closed(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return modules that are not watched: those whose code torch.compile takes over, as hooks in them would be
    compiled too, and the parts of one that runs them on some rows at a time.

    A module that torch.compile wrapped (an OptimizedModule) is called as any other.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(wrapped := module._modules.get("_orig_mod"), torch.nn.Module):
            inside.update(wrapped.modules())
        elif module._compiled_call_impl is not None:
            inside.update(module.modules())
        elif getattr(module.__dict__.get("forward"), "by_rows", False):
            inside.update({*module.modules()} - {module})
    return inside


def watch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
    """Run one forward pass whose graph holds nothing, and return the model's call and its result."""
    names = {module: name for name, module in model.named_modules()}
    root = Call(model, "", None)
    open_calls = [root]

    def begin(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is model and len(open_calls) == 1 and not root.inputs:
            root.inputs = seen((args, kwargs))
            return
        parent = open_calls[-1]
        call = Call(module, names[module], parent)
        call.inputs = seen((args, kwargs))
        if parent.children and meet(parent.children[-1].outputs, call.inputs):
            call.before = parent.children[-1]
        call.takes_parents = meet(parent.inputs, call.inputs)
        passed = keys(tensor for sibling in parent.children[:-1] for tensor in sibling.outputs)
        if parent.children and (source := parent.source()) is not None:
            passed |= keys(source.outputs) & keys(parent.children[0].inputs)
        passed -= keys(call.before.outputs) if call.before else set()
        call.skips = not passed.isdisjoint(keys(call.inputs))
        parent.children.append(call)
        open_calls.append(call)

    def no_backward(_: object) -> torch.Tensor:
        raise GraphIsGone(open_calls[-1].name or type(model).__name__)

    def end(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = open_calls[-1] if module is not model or len(open_calls) > 1 else root
        call.outputs = seen(out)
        call.defers = any(is_deferred(leaf) for leaf in pytree.tree_leaves(out))
        call.elements = sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        call.elements += sum(child.elements for child in call.children)
        call.passes = bool(call.children) and meet(call.children[-1].outputs, call.outputs)
        if call is not root:
            open_calls.pop()
            changed = [tensor for tensor in call.inputs if tensor.changed()]
            source = call.source()
            call.changes = bool(changed)
            call.changes_stream = source is not None and keys(changed) <= keys(source.outputs)

    with ExitStack() as stack:
        for module in names.keys() - closed(model):
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end, with_kwargs=True).remove)
        # In grad mode, as in training: a model may do otherwise without it, and a kernel take more memory.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, no_backward):
            out = model(*args, **kwargs)
    return root, out


def stages_of(call: Call, repeated: set[torch.nn.Module], most: float) -> list[Call]:
    """Return the stages that a call's children form, run after run.

    most: elements above which a child is no stage, although its own do not carry its whole work."""
    stages: list[Call] = []
    for run in call.runs():
        for child in run:
            parts = stages_of(child, repeated, most) if child.children else []
            carried = len(run) > 1 and child.elements <= most
            if len(parts) > 1 and (through(child, parts) if carried else part(child, parts) >= PART):
                stages += parts
            elif child.module not in repeated and not child.defers:
                stages.append(child)
    return stages


def through(call: Call, stages: list[Call]) -> bool:
    """Return whether these stages carry the call from its input to its output."""
    return (
        stages[0].takes_parents
        and call.passes
        and all(stage.linked or stage.takes_parents for stage in stages)
        and not any(child.skips for child in call.children)
        and len(list(call.runs())) == 1
        and part(call, stages) > PART
    )


def part(call: Call, stages: list[Call]) -> float:
    return sum(stage.elements for stage in stages) / max(call.elements - call_output(call), 1)


def call_output(call: Call) -> int:
    return call.elements - sum(child.elements for child in call.children)


def find_chain(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """Return the stages of the model's chain, in the order of their calls.

    Raises NoStages if there is nothing to checkpoint: no module of it is called by another.
    """
    root, _ = watch(model, args, kwargs)
    return chain_of(root)


def is_tangled(root: Call, stages: list[Call], blocks: Sequence[SplitBlock | None]) -> bool:
    """Return whether the stages are no chain, or too small a part of the model's call, or one that cannot be split is
    too large a part.

    Behind the beginning, with its embeddings, a stage of a chain takes what the one before made."""
    linked = [stage.source() is not None for stage in stages]
    begun = linked.index(True) if True in linked else 0
    return (
        linked[begun:].count(False) >= TANGLED
        or part(root, stages) < PART
        or any(
            block is None and stage.children and stage.elements > LARGE * root.elements
            for stage, block in zip(stages, blocks, strict=True)
        )
    )


class NoStages(ValueError):
    """Raised of a model that has no chain of stages."""


def chain_of(root: Call, most: float = math.inf) -> list[Call]:
    """Return the stages of a model's call. Raises NoStages if there are none."""
    times: Counter[torch.nn.Module] = Counter()

    def count(call: Call) -> None:
        times[call.module] += 1
        for child in call.children:
            count(child)

    count(root)
    stages: list[Call] = []
    for stage in stages_of(root, {module for module, n in times.items() if n > 1}, most):
        if not stage.changes or (stages and stage.changes_stream and stage.follows(stages[-1])):
            stages.append(stage)
    if not stages:
        raise NoStages(
            f"{type(root.module).__name__} calls none of its modules exactly once in a forward pass, so it has no "
            "chain of stages to checkpoint. Checkpoint parts of its forward with memopt.checkpoint()"
        )
    return stages


# ---- the chain -------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A module of the chain, whose stages begin at `first`: itself, or the block's parts."""

    module: torch.nn.Module
    name: str
    forward: Any
    first: int
    block: SplitBlock | None

    def call(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.block is None:
            return run(self.first, *args, **kwargs)
        return self.block.call(run, self.first, args, kwargs)

    @property
    def visits(self) -> bool:
        """Return whether the stages bring parameters that are offloaded; those of the model itself are there."""
        return self.block is None or not self.block.whole

    def names(self) -> list[str]:
        if self.block is None:
            return [self.name]
        count = len(self.block.names)
        parts = [" + ".join(names) or f"{n + 1} of {count}" for n, names in enumerate(self.block.names)]
        return [f"{self.name} ({part})" if self.name else part for part in parts]


class MeasuredStages:
    """The forward of a member while its stages are measured: run(k, arguments) runs one."""

    def __init__(self, member: Member, run: Run) -> None:
        self.member, self.run, self.visits = member, run, member.visits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.member.call(self.run, args, kwargs)


class ModelChain:
    """The stages of a model on these arguments.

    functions, names: of each stage. changing: numbers of those that change their input in place. lingering: of each
    stage the first one of its block, whose input the model holds for as long as the block's forward lasts; None for
    that one itself. state: what each stage's runs change in modules. standing: what is there before and after a step.
    mapped: of it, parameters offloaded to a file, and the bytes of them in memory at once. trainable: the parameters
    that gradients are made for."""

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.standing = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
        self.device = device_of(self.standing)
        self.mapped: tuple[list[torch.Tensor], int] = [], 0
        residency = residency_of(model)
        if residency is not None:
            self.device = residency.device
            self.standing = [tensor for tensor in self.standing if tensor.device == self.device]
            travelling = [p for p in self.standing if residency.carrier.travels(p)]
            self.mapped = travelling, mapped_bytes(residency)
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.has_own_parameters = not is_sharded(model)  # a unit's forward puts others in their places
        before = Snapshot(model.modules(), self.has_own_parameters)
        root, _ = watch(model, args, kwargs)
        calls, found = chain_of(root), before.changes()
        blocks, changes = self.split_all(calls, found)
        if self.has_own_parameters and is_tangled(root, calls, blocks):
            whole, changes_of_whole = self.split_all([root], found, whole=True)
            if whole != [None]:
                calls, blocks, changes = [root], whole, changes_of_whole
            elif len(finer := chain_of(root, LARGE * root.elements)) > len(calls):
                calls = finer
                blocks, changes = self.split_all(calls, found)
        if sum(1 if block is None else len(block.parts) for block in blocks) > MOST_STAGES:
            blocks = [None] * len(calls)
        self.members: list[Member] = []
        self.functions: list[Any] = []
        self.lingering: list[int | None] = []
        self.changing: set[int] = set()
        self.state: list[Changes] = []
        for call, block in zip(calls, blocks, strict=True):
            first = len(self.functions)
            forward = own_forward(call.module)
            self.members.append(Member(call.module, call.name, forward, first, block))
            if call.changes:
                self.changing.add(first)
            if block is not None:
                block.changes = changes[len(self.members) - 1]
            visit = Visit.of(residency, call.module, set(call.module.modules()))
            if block is not None:
                block.visit = visit
                for part in block.parts:
                    part.visit = Visit.of(residency, call.module, set(part.modules_used))
            elif visit is not at_home:
                forward = VisitingStage(forward, call.module, visit)
            self.functions += [forward] if block is None else block.parts
            self.state += [
                changes_within(changes[len(self.members) - 1], part.modules_called)
                if block is not None and block.whole
                else changes[len(self.members) - 1]
                for part in self.functions[first:]
            ]
            self.lingering += [None] + [first] * (len(self.functions) - first - 1)
        self.norms = [batch_norm.of_function(function) or () for function in self.functions]
        self.names = [name for member in self.members for name in member.names()]

    def split_all(
        self, calls: Sequence[Call], changes: Changes, *, whole: bool = False
    ) -> tuple[list[SplitBlock | None], list[Changes]]:
        """Split each stage that can be split, in one forward pass, and return also what each stage's runs change.

        changes: what a forward pass of the model changes in modules. whole: the only one is the model's.
        """
        blocks: list[SplitBlock | None] = [None] * len(calls)
        functions = [own_forward(call.module) for call in calls]
        plain = [is_its_classes(call.module) for call in calls]
        own: list[Changes] = [{} for _ in calls]
        before: Any = ()

        def run(k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal before
            module = calls[k].module
            call = StageCall(args, kwargs, before, changes_within(changes, module.modules()))
            linked = call.take_linked()
            with repeatedly(calls[k].name):
                if calls[k].children and plain[k] and not calls[k].changes:
                    found = split(module, calls[k].name, functions[k], call, linked, whole=whole)
                    blocks[k] = found if isinstance(found, SplitBlock) else None
                snapshot = Snapshot(module.modules(), self.has_own_parameters)
                out = without_graph(functions[k], args, kwargs, calls[k].name)
                own[k] = snapshot.changes()
            call.state.random.forget_unchanged()
            call.note_outputs(out)
            before = call.outputs
            return out

        stand_ins = [lambda *args, _k=k, **kwargs: run(_k, args, kwargs) for k in range(len(calls))]
        with torch.enable_grad(), forwards([call.module for call in calls], stand_ins):
            self.model(*self.args, **self.kwargs)
        changes = joined(changes, *own)
        return blocks, [
            joined(own[k], changes_within(changes, call.module.modules())) for k, call in enumerate(calls)
        ]

    def run(self, run: Run) -> Any:
        """Run one forward pass of the model, in which stage k is run(k, its arguments)."""
        stand_ins = [MeasuredStages(member, run) for member in self.members]
        with forwards([member.module for member in self.members], stand_ins):
            return self.model(*self.args, **self.kwargs)


@contextmanager
def repeatedly(name: str) -> Iterator[None]:
    """Explain errors of a stage that runs by itself, after the whole model has run."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except GraphIsGone:
        raise GraphIsGone(name) from None
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise ValueError(
                f"{name} changes in place a tensor that its own backward pass needs, which fails without checkpoints "
                f"too: {error}. Change a clone() instead"
            ) from error
        raise ValueError(
            f"{name} behaves differently when it runs again: {error}. A cache or a counter that each run changes may "
            "be the cause, if it is neither an attribute of a module nor an argument (a global, say)"
        ) from error


def without_graph(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Run the function and return its result without a graph, so that later code may change it in place.

    The result requires gradients where it did before. name: of the stage, for the error of a backward through it.
    """

    def no_backward(_: object) -> torch.Tensor:
        raise GraphIsGone(name)

    given = {(id(tensor), tensor._version) for tensor in tensors_in((args, kwargs))}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, no_backward):
        leaves, spec = pytree.tree_flatten(function(*args, **kwargs))
    for place, leaf in enumerate(leaves):
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.grad_fn is not None
            and (id(leaf), leaf._version) not in given
        ):
            leaves[place] = changeable(leaf.detach().requires_grad_())
    return pytree.tree_unflatten(leaves, spec)
