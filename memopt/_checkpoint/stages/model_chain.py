"""A model as a chain: the modules, or parts of modules, that are its stages, and how they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.runner import StageCall, changeable
from memopt._checkpoint.stages.costs import GraphIsGone, tensors_in
from memopt._checkpoint.stages.find import Call, find_chain
from memopt._checkpoint.stages.module_state import Changes, Snapshot, changes_within, joined
from memopt._checkpoint.stages.ranks import is_sharded
from memopt._checkpoint.stages.split import Run, SplitBlock, split

MOST_STAGES = 256  # that blocks are split up to: the solver's time grows with the cube of their number


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

    def names(self) -> list[str]:
        if self.block is None:
            return [self.name]
        count = len(self.block.names)
        return [
            f"{self.name} ({' + '.join(names) or f'{n + 1} of {count}'})"
            for n, names in enumerate(self.block.names)
        ]


@contextmanager
def forwards(modules: Sequence[torch.nn.Module], replacements: Sequence[Any]) -> Iterator[None]:
    """Replace the forwards of these modules within the context."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, replacement in zip(modules, replacements, strict=True):
            module.__dict__["forward"] = replacement
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if old is not None:
                module.__dict__["forward"] = old


class ModelChain:
    """The stages of a model on these arguments.

    functions, names: of each stage. changing: numbers of those that change their input in place. lingering: of each
    stage the first one of its block, whose input the model holds for as long as the block's forward lasts; None for
    that one itself. state: what each stage's runs change in modules. standing: what is there before and after a step.
    trainable: the parameters that gradients are made for."""

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.standing = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.has_own_parameters = not is_sharded(model)  # a unit's forward puts others in their places
        before = Snapshot(model.modules(), self.has_own_parameters)
        calls = find_chain(model, args, kwargs)
        blocks, changes = self.split_all(calls, before.changes())
        if sum(1 if block is None else len(block.parts) for block in blocks) > MOST_STAGES:
            blocks = [None] * len(calls)
        self.members: list[Member] = []
        self.functions: list[Any] = []
        self.lingering: list[int | None] = []
        self.changing: set[int] = set()
        self.state: list[Changes] = []
        for call, block in zip(calls, blocks, strict=True):
            first = len(self.functions)
            forward = call.module.forward
            self.members.append(Member(call.module, call.name, forward, first, block))
            if call.changes:
                self.changing.add(first)
            self.functions += [forward] if block is None else block.parts
            self.state += [changes[len(self.members) - 1]] * (len(self.functions) - first)
            self.lingering += [None] + [first] * (len(self.functions) - first - 1)
        self.norms = [batch_norm.of_function(function) or () for function in self.functions]
        self.names = [name for member in self.members for name in member.names()]

    def split_all(
        self, calls: Sequence[Call], changes: Changes
    ) -> tuple[list[SplitBlock | None], list[Changes]]:
        """Split each stage that can be split, in one forward pass, and return also what each stage's runs change.

        changes: what a forward pass of the model changes in modules.
        """
        blocks: list[SplitBlock | None] = [None] * len(calls)
        functions = [call.module.forward for call in calls]
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
                    found = split(module, calls[k].name, functions[k], call, linked)
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
        stand_ins = [
            lambda *args, _member=member, **kwargs: _member.call(run, args, kwargs) for member in self.members
        ]
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
                f"{name} changes in place what its own backward pass needs, as it would without checkpoints: {error}. "
                "Let it use a clone()"
            ) from error
        raise ValueError(
            f"{name} behaves differently when it runs again: {error}. A cache or a counter that each run changes may "
            "be why; Hugging Face's models keep a cache unless model.config.use_cache = False"
        ) from error


def is_its_classes(module: torch.nn.Module) -> bool:
    """Whether the module's forward is its class's own, neither compiled nor replaced.

    A replaced forward may have effects that cannot be seen.
    """
    return not (
        "forward" in module.__dict__ or hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    )


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
