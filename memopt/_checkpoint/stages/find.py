"""Search for the chain in a model: modules that are called one after another, each on the output of the one before.

One forward pass is watched. The calls of a module's children fall into runs, in which each takes, unchanged, a tensor
that the one before returned. A child is split into its own children where they carry its whole work from its input to
its output (an nn.Sequential, a stage of a ResNet). A child that adds something of its own (a residual block) is a
stage, and so is one in which something bypasses a child: it would be held however the children were run. A module that
is called more than once in a pass is never a stage, because its calls could not be told apart. One that changes its
argument in place is a stage only behind the one that made it, with which it runs again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.stages.costs import GraphIsGone

PART = 0.5  # of a lone child's elements that its own runs must make for it to be split


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
        self.passes = False  # the parent returned what the last of the children did
        self.inputs: list[TensorVersion] = []
        self.outputs: list[TensorVersion] = []
        self.elements = 0  # of its outputs and of those of the calls in it

    @property
    def linked(self) -> bool:
        return self.before is not None

    def source(self) -> Call | None:
        """The call of which this one, or the outermost that begins with it, takes an output."""
        call: Call | None = self
        while call is not None and call.before is None:
            first = call.parent is not None and call.parent.children[0] is call and call.takes_parents
            call = call.parent if first else None
        return call.before if call is not None else None

    def follows(self, other: Call) -> bool:
        """Whether this call's source is `other`, or a call that `other` ends with."""
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


class TensorVersion(NamedTuple):
    """A tensor at one version: after an in-place change it is another."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    def key(self) -> tuple[int, int] | None:
        tensor = self.tensor()
        return None if tensor is None else (id(tensor), self.version)

    def changed(self) -> bool:
        tensor = self.tensor()
        return tensor is not None and version(tensor) != self.version


def version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def seen(value: Any) -> list[TensorVersion]:
    return [
        TensorVersion(weakref.ref(t), version(t))
        for t in pytree.tree_leaves(value)
        if isinstance(t, torch.Tensor)
    ]


def keys(tensors: Iterable[TensorVersion]) -> set[tuple[int, int]]:
    return {key for tensor in tensors if (key := tensor.key()) is not None}


def meet(a: Iterable[TensorVersion], b: Iterable[TensorVersion]) -> bool:
    return not keys(a).isdisjoint(keys(b))


def compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return modules whose code torch.compile takes over: hooks in them would be compiled too.

    A module that it wrapped (an OptimizedModule) is called as any other.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(wrapped := module._modules.get("_orig_mod"), torch.nn.Module):
            inside.update(wrapped.modules())
        elif module._compiled_call_impl is not None:
            inside.update(module.modules())
    return inside


def watch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
    """Run one forward pass without a graph, and return the model's call and its result."""
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

    def end(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = open_calls[-1] if module is not model or len(open_calls) > 1 else root
        call.outputs = seen(out)
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
        for module in names.keys() - compiled(model):
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end, with_kwargs=True).remove)
        try:
            with torch.no_grad():
                out = model(*args, **kwargs)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise GraphIsGone(open_calls[-1].name or type(model).__name__) from error
            raise
    return root, out


def split(call: Call, repeated: set[torch.nn.Module]) -> list[Call]:
    """The stages that a call's children make, those of one run after those of the other."""
    stages: list[Call] = []
    for run in call.runs():
        for child in run:
            parts = split(child, repeated) if child.children else []
            if len(parts) > 1 and (through(child, parts) if len(run) > 1 else part(child, parts) >= PART):
                stages += parts
            elif child.module not in repeated:
                stages.append(child)
    return stages


def through(call: Call, stages: list[Call]) -> bool:
    """Whether these stages carry the call from its input to its output."""
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

    Raises ValueError if there is nothing to checkpoint: no module of it is called by another.
    """
    root, _ = watch(model, args, kwargs)
    times: Counter[torch.nn.Module] = Counter()

    def count(call: Call) -> None:
        times[call.module] += 1
        for child in call.children:
            count(child)

    count(root)
    stages: list[Call] = []
    for stage in split(root, {module for module, n in times.items() if n > 1}):
        if not stage.changes or (stages and stage.changes_stream and stage.follows(stages[-1])):
            stages.append(stage)
    if not stages:
        raise ValueError(
            f"{type(model).__name__} calls no module of its own once in a forward pass: there is no chain of stages "
            "to checkpoint. Checkpoint parts of its forward with memopt.checkpoint()"
        )
    return stages
