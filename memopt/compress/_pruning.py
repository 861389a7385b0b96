"""memopt.compress.prune_(): weights set to zero for good, or channels taken out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from memopt.compress._all_or_nothing import Outcome, carry_out
from memopt.compress._chosen_layers import Layers, choose
from memopt.compress._fractions import fraction
from memopt.compress._model_checks import check_model, weight_of
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
    method: str = "l1_unstructured",
    *,
    layers: Layers = None,
    sample: Any = None,
    evaluate: Evaluate = None,
) -> Report:
    """Prune a model in place and for good: no masks, hooks or second copies stay.

    Where only values change ("l1_unstructured", "2:4") parameters stay the objects they are, with their ties, views,
    hooks and optimizers, also of models whose layers memopt offloads or checkpoints. Until all is done the old values
    live beside the new ones.

    Args:
        model: The model.
        amount: A share, a float within 0…1.
        method: "l1_unstructured": of each weight the `amount` of elements of the smallest magnitude become zero, as
            torch.nn.utils.prune.l1_unstructured() and remove() do it. Zeros take as much memory as other numbers: it
            saves 0 bytes, and the report says so; sparsify_() can turn them into fewer. "2:4": of each four neighbours
            along a weight's input dimension the two smallest become zero; amount is 0.5. It saves 0 bytes as well,
            until sparsify_(model, "2:4") on a device that has the kernels. "structured": whole output channels, the
            `amount` of each layer's, are taken out by Torch-Pruning, together with all that depends on them in other
            layers: layers become smaller, in training and on disk. What makes the model's output keeps its size. The
            smaller parameters are new objects: make the optimizer afterwards.
        layers: Names or modules of the model, with all that is within, or a function of name and module; by default all
            linear and convolution layers and attention's projections (of "2:4" linear layers and projections).
        sample: One argument of the model, a tuple of arguments or a mapping of keyword arguments: "structured" runs the
            model with it to find what depends on what.
        evaluate: A function of the model that returns its accuracy; it is called before and after, in eval mode and
            without gradients.

    Returns:
        A Report.

    Raises:
        TypeError: An argument is none of its kind. The model is unchanged then, as with all of these.
        ValueError: An amount outside 0…1, unknown layers, none that fit, weights that are masked, parametrized,
            quantised, sparse, sharded or on meta; the message names the layer and the remedy.
        ImportError: Torch-Pruning is missing.

    Example:
        >>> print(memopt.compress.prune_(model, 0.5, "structured", sample=images))
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
    share = fraction(amount)
    if method == "structured":
        from memopt.compress._structured_pruning import take_channels

        return take_channels(model, share, layers, sample, evaluate)
    if sample is not None:
        raise ValueError(f"sample= is for method='structured'; {method!r} runs no model")
    function = f"prune_ {method}"
    check_model(model, function, replaces=False)
    if method == "2:4":
        if share != 0.5:
            raise ValueError(f"amount={amount!r}: 2:4 takes two of each four, amount=0.5")
        pruning: prune.BasePruningMethod = TwoOfFour()
        weights, skipped = _multiples_of_four(_weights(model, layers, function, (nn.Linear,)))
    else:
        pruning = prune.L1Unstructured(share)
        weights, skipped = _weights(model, layers, function, (nn.Linear, *_CONVOLUTIONS)), {}
    return carry_out(model, function, partial(_zero, weights, skipped, pruning), evaluate)


def _weights(
    model: nn.Module, layers: Layers, function: str, kinds: tuple[type[nn.Module], ...]
) -> dict[str, nn.Parameter]:
    """The weights by name, each parameter once."""

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
        name: f"its rows have {weight.shape[-1]} elements, no multiple of four"
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
        "a zero takes as much memory as any other number: sparsify_() says where zeros can be left out"
    )
