"""Changes that make a script fit its card. Each is tested by a run; those that do not fit then are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memopt import _C
from memopt._estimate import cards
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.prediction import Advice, Estimate
from memopt._estimate.request import (
    CHECKPOINT,
    EIGHT_BITS,
    FOUR_BITS,
    FUSED,
    LOSS_HEAD,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
)

_SWITCH = {
    "native": "the native allocator",
    "expandable": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "pool": 'memopt.enable(backend="pool")',
}
_CHANGES = {
    FUSED: "the same up to rounding",
    EIGHT_BITS: "other results: states of 8 bits",
    FOUR_BITS: "other results: states of 4 bits",
    LOSS_HEAD: "the same up to rounding",
    OFFLOAD_GRADIENTS: "the same up to rounding",
    OFFLOAD_STATES: "the same up to rounding",
}
_OPTIONS = {  # of memopt.optim's optimizers, by technique
    EIGHT_BITS: "state_bits=8",
    FOUR_BITS: "state_bits=4",
    OFFLOAD_GRADIENTS: "offload_gradients=True",
    OFFLOAD_STATES: "offload_states=True",
}
# Of the memory that is left beside the context: where the allocator needs more room than the first asks for.
_BUDGETS = (0.97, 0.9)
_TOGETHER = (
    (FUSED, CHECKPOINT),
    (FUSED, OFFLOAD_ACTIVATIONS),
    (LOSS_HEAD, FUSED),
    (LOSS_HEAD, CHECKPOINT),
    (LOSS_HEAD, OFFLOAD_ACTIVATIONS),
    (OFFLOAD_GRADIENTS, OFFLOAD_STATES),
    (LOSS_HEAD, OFFLOAD_GRADIENTS, OFFLOAD_STATES),
    (OFFLOAD_GRADIENTS, OFFLOAD_STATES, OFFLOAD_ACTIVATIONS),
    (OFFLOAD_LAYERS, OFFLOAD_ACTIVATIONS),
    (OFFLOAD_LAYERS, CHECKPOINT),
    (EIGHT_BITS, OFFLOAD_GRADIENTS),
    (FOUR_BITS, OFFLOAD_GRADIENTS),
    (EIGHT_BITS, OFFLOAD_GRADIENTS, OFFLOAD_STATES, LOSS_HEAD),
    (EIGHT_BITS, CHECKPOINT),
    (EIGHT_BITS, OFFLOAD_ACTIVATIONS),
    (EIGHT_BITS, OFFLOAD_ACTIVATIONS, OFFLOAD_LAYERS),
)
_ENOUGH = 2  # combinations that fit


class TriedTechnique(NamedTuple):
    """A run on the card with techniques applied.

    `fits`: also at the upper end of unknown values; `answer`: None if the script does not run with them.
    """

    fits: bool
    answer: Answer | None


Try = Callable[[list[str], str], TriedTechnique]  # techniques, allocator


def find(found: Estimate, card: Card, backend: str, attempt: Try) -> list[Advice]:
    """Find changes with which a script fits its card, for an estimate that does not fit.

    Args:
        found: The estimate, with the results of other allocators and batch sizes.
        card: The card that it does not fit.
        backend: The allocator that it does not fit with.
        attempt: Runs the script with techniques and an allocator.

    Returns:
        The advice; changes that do not affect results come first. Combinations are tested if no technique is enough
            alone.
    """
    listed = [
        Advice(_SWITCH[one.name], one.allocated)
        for one in found.backends
        if one.name != backend and one.completes
    ]
    met: dict[str, str] = {}  # techniques of which the script has something, and how they are written
    enough = False  # 8 bits are: then 4 are not tried
    for technique in _worth_trying(found):
        if enough and technique == FOUR_BITS:
            continue
        for names in _written(technique, card, found):
            result = attempt([names], backend)
            if result.answer is None or technique not in result.answer.more["techniques"]:
                continue
            met[technique] = names
            if result.fits:
                listed.append(_told((names,), result.answer, ""))
                enough = enough or technique == EIGHT_BITS
                break
    batch = found.largest_batch
    if batch and batch["size"] and batch["now"] and batch["size"] < batch["now"]:
        what = f"batch {batch['size']} instead of {batch['now']}"
        listed.append(Advice(what, batch["peak"], "other results: another batch"))
    if not listed:
        listed += _combined(found, backend, met, attempt)
    listed.sort(key=lambda one: bool(one.changes))
    larger = cards.smallest_with(found.needed[1])
    if larger is not None and larger.usable > card.usable:
        what = f"a card of {_C.format_size(larger.usable)}, as {larger.name}"
        listed.append(Advice(what, found.allocated[1]))
    return listed


def _worth_trying(found: Estimate) -> Iterator[str]:
    """Return the techniques that could save memory at the peak."""
    of = found.by_category
    if of.get("optimizer"):
        yield from (FUSED, EIGHT_BITS, FOUR_BITS, OFFLOAD_STATES, OFFLOAD_GRADIENTS)
    if of.get("activations"):
        yield from (CHECKPOINT, OFFLOAD_ACTIVATIONS, LOSS_HEAD)
    if of.get("parameters"):
        yield OFFLOAD_LAYERS


def _written(technique: str, card: Card, found: Estimate) -> list[str]:
    if technique != CHECKPOINT:
        return [technique]
    room = card.usable - found.context - (found.reserved[1] - found.allocated[1])
    budgets = (int(share * room) >> 20 for share in _BUDGETS)
    return [f"{CHECKPOINT}:{budget << 20}" for budget in budgets if budget > 0]


def _combined(found: Estimate, backend: str, met: dict[str, str], attempt: Try) -> list[Advice]:
    """Test combinations of techniques with the allocator that holds the least memory besides."""
    least = min(
        (one for one in found.backends if one.name != "pool"), key=lambda one: one.reserved, default=None
    )
    chosen = backend if least is None or backend == "pool" else least.name
    listed: list[Advice] = []
    for together in _TOGETHER:
        names = [met[technique] for technique in together if technique in met]
        if len(names) < len(together):
            continue
        result = attempt(names, chosen)
        if (
            result.fits
            and result.answer is not None
            and set(together) <= set(result.answer.more["techniques"])
        ):
            listed.append(_told(tuple(names), result.answer, "" if chosen == backend else _SWITCH[chosen]))
            if len(listed) == _ENOUGH:
                break
    return listed


def _told(names: tuple[str, ...], answer: Answer, switch: str) -> Advice:
    met: dict[str, list[str]] = answer.more["techniques"]
    options = [name for name in names if name in _OPTIONS]
    what = [_in_words(name, met) for name in names if name not in _OPTIONS]
    if options:
        kinds = ", ".join(dict.fromkeys(kind for name in options for kind in met[name]))
        what.insert(0, f"memopt.optim.{kinds}(..., {', '.join(_OPTIONS[name] for name in options)})")
        if OFFLOAD_GRADIENTS in options:
            what.insert(1, "memopt.amp's clip_grad_norm_ and GradScaler, where it clips or scales")
    if switch:
        what.append(switch)
    changes = dict.fromkeys(_CHANGES[name] for name in names if name in _CHANGES)
    return Advice(" + ".join(what), answer.peak_allocated, ", ".join(changes))


def _in_words(name: str, met: dict[str, list[str]]) -> str:
    technique, _, budget = name.partition(":")
    of = ", ".join(met[technique])
    return {
        FUSED: f"torch.optim.{of}(..., fused=True)",
        OFFLOAD_ACTIVATIONS: "memopt.offload_activations() around the forward pass",
        LOSS_HEAD: "memopt.nn.linear_cross_entropy(rows, head.weight, targets, head.bias) instead of the head and its "
        "cross_entropy (memopt.nn.fuse_loss_head(model) for a model of transformers)",
        OFFLOAD_LAYERS: "memopt.offload_layers(model) before the optimizer is made",
        CHECKPOINT: f'memopt.auto_checkpoint(model, sample, memory_budget="{int(budget or 0) >> 20}MiB", '
        "optimizer=optimizer, accumulate=True)",
    }[technique]
