"""memopt.compress.prune_(): weights set to zero for good, or channels taken out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

from memopt._checkpoint.auto import sample_arguments
from memopt._runtime.state_snapshot import Modes, preserve_state
from memopt.compress._model_changes import (
    Layers,
    Outcome,
    carry_out,
    check_model,
    choose,
    fraction,
    library,
    shown,
    unusable,
    weight_of,
)
from memopt.compress._saved_report import Evaluate, Report

METHODS = ("l1_unstructured", "structured", "2:4")

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class TwoOfFour(prune.BasePruningMethod):
    """The pattern of semi-structured sparsity: of each four neighbours in a row, two are zero.

    Keeps the two largest magnitudes of each four along the last dimension, which must be a multiple of four: what
    NVIDIA's sparse tensor cores take (https://arxiv.org/abs/2104.08378, section 3).
    """

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        a, b, c, d = t.abs().mul_(default_mask).reshape(-1, 4).unbind(1)
        # Each pair is compared once; who wins twice stays. Of equals the first wins, on every device.
        ab, ac, ad, bc, bd, cd = (one.byte() for one in (a >= b, a >= c, a >= d, b >= c, b >= d, c >= d))
        wins = torch.stack([ab + ac + ad, 1 - ab + bc + bd, 2 - ac - bc + cd, 3 - ad - bd - cd], dim=1)
        return (wins >= 2).to(default_mask.dtype).reshape(t.shape)


def prune_(
    model: nn.Module,
    amount: float = 0.5,
    method: str | None = None,
    *,
    layers: Layers = None,
    sample: Any = None,
    evaluate: Evaluate = None,
) -> Report:
    """Prune a model in place and permanently: no masks, hooks or second copies remain.

    Where only values change ("l1_unstructured", "2:4"), parameters remain the same objects, with their ties, views,
    hooks and optimizers, also in models whose layers memopt offloads or checkpoints. Until the end of the call the old
    values are kept beside the new ones.

    Args:
        model: The model.
        amount: The share to prune, a float from 0 to 1.
        method: "l1_unstructured": the `amount` of each weight's elements with the smallest magnitude become zero, as by
            torch.nn.utils.prune.l1_unstructured() and remove(). Zeros take as much memory as other numbers, so it saves
            0 bytes, and the report says so; sparsify_() can store them in fewer. "2:4": of every four neighbours along
            a weight's input dimension the two smallest become zero; amount is 0.5. It also saves 0 bytes, until
            sparsify_(model, "2:4") on a device that has the kernels. "structured": Torch-Pruning removes whole output
            channels, the `amount` of each layer's, together with everything that depends on them in other layers:
            layers become smaller, in training and on disk. The layers that produce the model's output keep their size.
            The smaller parameters are new objects: create the optimizer afterwards. Without a method it is
            "l1_unstructured", with a DeprecationWarning.
        layers: Names or modules of the model, with all their submodules, or a function of name and module; by default
            all linear and convolution layers and attention's projections (for "2:4" linear layers and projections).
        sample: One argument of the model, a tuple of arguments or a mapping of keyword arguments: "structured" runs the
            model with it to find the dependencies between layers.
        evaluate: A function of the model that returns its accuracy; it is called before and after, in eval mode and
            without gradients.

    Returns:
        A Report.

    Raises:
        TypeError: An argument has the wrong type. The model is unchanged then, as with all of these.
        ValueError: The amount is outside 0…1, a layer is unknown, no layer is suitable, or a weight is masked,
            parametrized, quantised, sparse, sharded or on the meta device; the message names the layer and the remedy.
        ImportError: Torch-Pruning is missing.

    Examples:
        >>> print(memopt.compress.prune_(model, 0.5, "structured", sample=images))
    """
    if method is None:
        method = "l1_unstructured"
        warnings.warn(
            "prune_ without a method: name 'structured', which saves memory, or 'l1_unstructured' or '2:4', which "
            "do not",
            DeprecationWarning,
            stacklevel=2,
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
    share = fraction(amount)
    if method == "structured":
        return take_channels(model, share, layers, sample, evaluate)
    if sample is not None:
        raise ValueError(f"sample= is for method='structured'; {method!r} runs no model")
    function = f"prune_ {method}"
    check_model(model, function, replaces=False)
    if method == "2:4":
        if share != 0.5:
            raise ValueError(f"amount={amount!r}: 2:4 prunes two of each four elements, amount=0.5")
        pruning: prune.BasePruningMethod = TwoOfFour()
        weights, skipped = _multiples_of_four(_weights(model, layers, function, (nn.Linear,)))
    else:
        pruning = prune.L1Unstructured(share)
        weights, skipped = _weights(model, layers, function, (nn.Linear, *_CONVOLUTIONS)), {}
    return carry_out(model, function, partial(_zero, weights, skipped, pruning), evaluate)


def _weights(
    model: nn.Module, layers: Layers, function: str, kinds: tuple[type[nn.Module], ...]
) -> dict[str, nn.Parameter]:
    """Return the weights by name, each parameter once."""

    def fits(module: nn.Module) -> bool:
        return isinstance(module, (*kinds, nn.MultiheadAttention)) or _was_one(module, kinds)

    found: dict[str, nn.Parameter] = {}
    for name, module in choose(model, layers, fits, "layer that can be pruned").items():
        own = (
            [n for n in _ATTENTION if module._parameters.get(n) is not None]
            if isinstance(module, nn.MultiheadAttention)
            else ["weight"]
        )
        for parameter in own:
            weight = weight_of(name, module, parameter, function)
            if not any(weight is other for other in found.values()):
                found[f"{name}.{parameter}" if name else parameter] = weight
    return found


def _was_one(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """torch.ao's quantised twins of those layers, which are refused rather than passed over."""
    return type(module).__module__.startswith("torch.ao.nn.") and type(module).__name__ in {
        kind.__name__ for kind in kinds
    }


def _multiples_of_four(
    weights: dict[str, nn.Parameter],
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    skipped = {
        name: f"its rows have {weight.shape[-1]} elements, not a multiple of four"
        for name, weight in weights.items()
        if weight.shape[-1] % 4
    }
    if len(skipped) == len(weights):
        name, why = next(iter(skipped.items()))
        raise ValueError(f"prune_ 2:4: no weight can be pruned: {name}: {why}")
    return {name: weight for name, weight in weights.items() if name not in skipped}, skipped


def _zero(
    weights: dict[str, nn.Parameter],
    skipped: dict[str, str],
    pruning: prune.BasePruningMethod,
    outcome: Outcome,
) -> None:
    outcome.skipped.update(skipped)
    with torch.no_grad():
        for weight in weights.values():
            # The library's views refuse channels_last.
            values = weight.detach().contiguous()
            mask = pruning.compute_mask(values, torch.ones_like(values, dtype=torch.bool))
            outcome.undo.append(partial(weight.detach().copy_, weight.detach().clone()))
            weight.mul_(mask)
    outcome.changed.extend(weights)
    outcome.notes.append(
        "zeros take as much memory as other numbers: sparsify_() stores a layer without its zeros"
    )


# ---- channels --------------------------------------------------------------------------------------------------------
# Channels taken out of a model, with all that depends on them in other layers, by Torch-Pruning.


_FUNCTION = "prune_ structured"


def take_channels(model: nn.Module, share: float, layers: Layers, sample: Any, evaluate: Evaluate) -> Report:
    """Implement prune_(method="structured")."""
    check_model(model, _FUNCTION, replaces=True)
    if sample is None:
        raise ValueError(
            "prune_ structured runs the model once to find the dependencies between layers: give it a sample=, one "
            "argument, a tuple of arguments, or a mapping of keyword arguments"
        )
    if share == 1.0:
        raise ValueError(
            "amount=1.0: a layer cannot be left without outputs; at least one channel of each must remain"
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
                outcome.skipped[name] = "its channels are the model's output"
            else:
                outcome.skipped[name] = (
                    f"amount={share} removes none or all of its channels, or they are tied to those of a layer that "
                    "is kept"
                )
        if not smaller and share:
            raise ValueError(
                f"{_FUNCTION}: nothing can be removed: "
                + "; ".join(f"{shown(name)}: {why}" for name, why in outcome.skipped.items())
            )
        outcome.changed.extend(name or "the model itself" for name in sorted(smaller))
        if smaller:
            outcome.notes.append("the smaller parameters are new objects: create the optimizer again")

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
    """Prune, and return the modules whose channels are those of the model's outputs.

    The outputs' shapes are appended to `shapes`."""
    import torch_pruning as tp

    made: list[Any] = []

    def outputs(result: Any) -> list[torch.Tensor]:
        shapes.extend(tuple(t.shape) for t in _tensors(result))
        found = [t for t in _tensors(result) if t.grad_fn is not None]
        if not found:
            raise ValueError(
                f"{_FUNCTION}: no output of the model has a graph, so the model cannot be traced: does its forward "
                "detach() the output, or run under no_grad()?"
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
    """Return the layers that make the model's outputs, by their dependencies, whichever channels.

    The library's groups of all channels would take as long as the pruning.
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
    """Return the nodes whose output channels are removed together with the root's."""
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
    """Put the model into eval mode; modes, buffers, gradients and random states are restored afterwards.

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
    """Return the shapes of the model's outputs for the sample."""
    with _only_looking(model):
        return [tuple(t.shape) for t in _tensors(model(*args, **kwargs))]


def _check_outputs(before: Sequence[Any], after: Sequence[Any]) -> None:
    for old, new in itertools.zip_longest(before, after):
        if old != new:
            raise ValueError(
                f"{_FUNCTION}: the model's output would be {new} instead of {old}: leave the layer that computes it "
                "out of layers="
            )


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Tie parameters again, since the library makes a new parameter at each place."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            there = model.get_parameter(other)
            if there is kept:
                continue
            if there.shape != kept.shape or not torch.equal(there, kept):
                raise ValueError(
                    f"{_FUNCTION}: {first} and {other} are one parameter, from which different channels would be "
                    "removed: name other layers in layers=, or untie them"
                )
            model.get_submodule(owner)._parameters[name] = kept
