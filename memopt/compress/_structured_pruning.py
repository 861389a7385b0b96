"""Channels taken out of a model, with all that depends on them in other layers, by Torch-Pruning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memopt._checkpoint.auto import sample_arguments
from memopt._runtime.state_snapshot import Modes, preserve_state
from memopt.compress._all_or_nothing import Outcome, carry_out
from memopt.compress._chosen_layers import Layers, choose, shown
from memopt.compress._libraries import library
from memopt.compress._model_checks import check_model, unusable, weight_of
from memopt.compress._saved_report import Evaluate, Report

_FUNCTION = "prune_ structured"


def take_channels(model: nn.Module, share: float, layers: Layers, sample: Any, evaluate: Evaluate) -> Report:
    """prune_(method="structured")."""
    check_model(model, _FUNCTION, replaces=True)
    if sample is None:
        raise ValueError(
            "prune_ structured runs the model once to find which layers depend on which: give it a sample=, one "
            "argument, a tuple of arguments, or a mapping of keyword arguments"
        )
    if share == 1.0:
        raise ValueError(
            "amount=1.0: a layer cannot go without outputs; at least one channel of each must stay"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "prune_ structured follows the graph that autograd records: call it outside inference_mode()"
        )
    library("torch_pruning", "torch-pruning", _FUNCTION)
    chosen = choose(model, layers, _has_channels, "layer with output channels")
    for name, module in chosen.items():
        weight_of(name, module, "weight", _FUNCTION)
    for name, parameter in model.named_parameters():
        if why := unusable(parameter):
            raise ValueError(f"{_FUNCTION}: {name} {why}")
    args, kwargs = sample_arguments(sample)

    def change(outcome: Outcome) -> None:
        ties = _ties(model)
        trainable = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        fixed = (
            []
            if layers is None
            else [m for m in model.modules() if _may_lose(m) and m not in chosen.values()]
        )
        before: list[tuple[int, ...]] = []
        at_end = _prune(model, share, fixed, args, kwargs, before)
        for name, p in model.named_parameters(remove_duplicate=False):
            p.requires_grad_(trainable[name])
        _tie_again(model, ties)
        _check_outputs(before, _outputs(model, args, kwargs))
        smaller = {
            name.rpartition(".")[0]
            for name, p in model.named_parameters(remove_duplicate=False)
            if tuple(p.shape) != shapes[name]
        }
        for name, module in chosen.items():
            if name in smaller:
                continue
            if module in at_end:
                outcome.skipped[name] = "its channels are those of the model's output"
            else:
                outcome.skipped[name] = (
                    f"amount={share} takes none of its channels, or all, or they are tied to those of a layer that "
                    "stays"
                )
        if not smaller and share:
            raise ValueError(
                f"{_FUNCTION}: nothing can be taken out: "
                + "; ".join(f"{shown(name)}: {why}" for name, why in outcome.skipped.items())
            )
        outcome.changed.extend(name or "the model itself" for name in sorted(smaller))
        if smaller:
            outcome.notes.append("the smaller parameters are new objects: make the optimizer anew")

    return carry_out(model, _FUNCTION, change, evaluate)


_KINDS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


def _has_channels(module: nn.Module) -> bool:
    return isinstance(module, _KINDS) and not isinstance(
        module,
        nn.modules.linear.NonDynamicallyQuantizableLinear,  # a part of attention
    )


def _may_lose(module: nn.Module) -> bool:
    return isinstance(module, (*_KINDS, nn.Embedding, nn.MultiheadAttention, nn.RNNBase))


def _prune(
    model: nn.Module,
    share: float,
    fixed: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: list[tuple[int, ...]],
) -> set[nn.Module]:
    """Returns the modules whose channels are those of the model's outputs, whose shapes it writes down."""
    import torch_pruning as tp

    made: list[Any] = []

    def outputs(result: Any) -> list[torch.Tensor]:
        shapes.extend(tuple(t.shape) for t in _tensors(result))
        found = [t for t in _tensors(result) if t.grad_fn is not None]
        if not found:
            raise ValueError(
                f"{_FUNCTION}: no output of the model has a graph, so that nothing of it can be traced: does its "
                "forward detach() it, or run under no_grad()?"
            )
        made.extend(t.grad_fn for t in found)
        return found

    with _only_looking(model, training_graph=True):
        pruner = tp.pruner.BasePruner(
            model,
            (args, dict(kwargs)),
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=share,
            ignored_layers=list(fixed),
            forward_fn=lambda traced, sample: traced(*sample[0], **sample[1]),
            output_transform=outputs,
            num_heads={m: m.num_heads for m in model.modules() if isinstance(m, nn.MultiheadAttention)},
            # The library's defaults are dicts that all calls share, and that keep the models of all calls.
            in_channel_groups={},
            out_channel_groups={},
        )
    at_end = _making_outputs(pruner, set(made))
    pruner.ignored_layers.extend(at_end)
    pruner.step()
    return at_end


def _making_outputs(pruner: Any, made: set[Any]) -> set[nn.Module]:
    """The layers that make the model's outputs, by their dependencies, whichever channels.

    The library's groups of all channels take as long as the pruning.
    """
    graph = pruner.DG
    ends = {node for node in graph.module2node.values() if node.grad_fn in made or not node.outputs}
    found: set[nn.Module] = set()
    for module, root in graph.module2node.items():
        if not isinstance(module, tuple(pruner.root_module_types)):
            continue
        targets = _losing_outputs(graph, root, graph.get_pruner_of_module(module).prune_out_channels)
        if ends.intersection(targets):
            found.update(node.module for node in targets if isinstance(node.module, nn.Module))
    return found


def _losing_outputs(graph: Any, root: Any, function: Any) -> set[Any]:
    """The nodes whose output channels go with the root's."""
    seen = {(root, function)}
    waiting = [(root, function)]
    while waiting:
        node, trigger = waiting.pop()
        for dependency in node.dependencies:
            step = (dependency.target, dependency.handler)
            if dependency.is_triggered_by(trigger) and step not in seen:
                seen.add(step)
                waiting.append(step)
    return {node for node, handler in seen if graph.is_out_channel_pruning_fn(handler)}


# ---- around it


@contextmanager
def _only_looking(model: nn.Module, *, training_graph: bool = False) -> Iterator[None]:
    """Put the model into eval mode; modes, buffers, gradients and random states are afterwards what they were.

    training_graph: with a graph through all parameters, frozen ones too.
    """
    modes = Modes(model)
    with preserve_state(model), torch.set_grad_enabled(training_graph):
        try:
            model.eval()
            if training_graph:
                model.requires_grad_(True)
            yield
        finally:
            modes.restore()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of what the model makes of the sample."""
    with _only_looking(model):
        return [tuple(t.shape) for t in _tensors(model(*args, **kwargs))]


def _check_outputs(before: Sequence[Any], after: Sequence[Any]) -> None:
    for old, new in itertools.zip_longest(before, after):
        if old != new:
            raise ValueError(
                f"{_FUNCTION}: the model's output would be {new} instead of {old}: leave the layer that makes it out "
                "of layers="
            )


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """The library makes a new parameter at each place."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            there = model.get_parameter(other)
            if there is kept:
                continue
            if there.shape != kept.shape or not torch.equal(there, kept):
                raise ValueError(
                    f"{_FUNCTION}: {first} and {other} are one parameter, of which different channels would go: name "
                    "other layers in layers=, or untie them"
                )
            model.get_submodule(owner)._parameters[name] = kept
