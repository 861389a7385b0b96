"""Changes that make a script fit its card. Each is tested by a run; those that do not fit then are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

from memopt import _C
from memopt._estimate import cards
from memopt._estimate.cards import Card
from memopt._estimate.forecast import Forecast
from memopt._estimate.prediction import Advice, Estimate
from memopt._estimate.runs_ahead import RunsAhead
from memopt._estimate.search import PAGES, TIERS, Names, Search, Tried, tier_of
from memopt._estimate.step_time import seconds
from memopt._run.plan import (
    BF16,
    CHECKPOINT,
    CODED_ACTIVATIONS,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    FUSED,
    GRADIENTS,
    KEEPS,
    LEAST_BUDGET,
    LOSS_HEAD,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OFFLOAD_STATES,
    OUTPUT,
    STATES_ON_DISK,
    STEP_IN_BACKWARD,
    TILES,
    in_code,
    of_optimizers,
    options_of,
    plain,
)

_SWITCH = {
    "native": "the native allocator",
    "expandable": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "pool": 'memopt.enable(backend="pool")',
}
_ROUNDED = "the same up to rounding"
CHANGES = {
    EIGHT_BITS: "other results: states of 8 bits",
    FOUR_BITS: "other results: states of 4 bits",
    FACTORED: "other results: second moments of rows and columns",
    BF16: "other results: products of bf16",
    CODED_ACTIVATIONS: "other results: saved activations of 8 bits",
    **dict.fromkeys((FUSED, LOSS_HEAD, TILES, OFFLOAD_LAYERS), _ROUNDED),
    **dict.fromkeys((OFFLOAD_GRADIENTS, OFFLOAD_STATES, STEP_IN_BACKWARD), _ROUNDED),
}
# Of the memory that is left beside the context: the allocator needs room besides.
_BUDGET = 0.9
LEAST = f"{CHECKPOINT}:1"  # the schedule that takes least


def find(found: Estimate, card: Card, backend: str, runs: RunsAhead[Names, Tried | str]) -> list[Advice]:
    """Find changes with which a script fits its card, for an estimate that does not fit.

    Args:
        found: The estimate, with the results of other allocators and batch sizes.
        card: The card that it does not fit.
        backend: The allocator that it does not fit with.
        runs: Of the script with techniques, and an allocator among them.

    Returns:
        The advice; changes that do not affect results come first. If no technique is enough alone, it is the
            combination that a fit would plan; if none can be, a larger card alone.
    """
    listed = [
        Advice(_SWITCH[one.name], one.allocated_bytes)
        for one in found.backends
        if one.name != backend and one.completes
    ]
    not_tried = (LEAST, FACTORED, BF16, CODED_ACTIVATIONS)
    search = search_of(
        found, card, backend, runs, lambda name: not (found.too_large_before_training or name in not_tried)
    )
    for tier in range(len(TIERS)):
        search.try_alone(tier)
    fitting = [name for name, tried in search.alone.items() if tried.fits and name not in _SWITCH]
    listed += [_advice(search, Names([name])) for name in fitting]
    batch = found.largest_batch
    if batch and batch["size"] and batch["now"] and batch["size"] < batch["now"]:
        what = f"batch {batch['size']} instead of {batch['now']}"
        listed.append(Advice(what, batch["peak"], "other results: another batch"))
    if not listed:
        listed += [_advice(search, names) for names in itertools.islice(search.found(), 1)]
    listed.sort(key=lambda one: bool(one.changes))
    larger = cards.smallest_with(found.needed_bytes[1])
    if larger is not None and larger.usable_bytes > card.usable_bytes:
        what = f"a card of {_C.format_size(larger.usable_bytes)}, as {larger.name}"
        listed.append(Advice(what, found.allocated_bytes[1]))
    return listed


def search_of(
    found: Estimate,
    card: Card,
    backend: str,
    runs: RunsAhead[Names, Tried | str],
    wanted: Callable[[str], bool] = lambda name: True,
    disk: str | None = None,
    host_memory: int | None = None,
) -> Search:
    """Return the search among the wanted ones of the techniques that could save memory at the peak. disk: a directory
    for states; host_memory: bytes of the host's for what is put there."""
    techniques = filter(wanted, _worth_trying(found, card, backend, disk))
    forecast = None
    if found.step and found.moments and found.processes is None:
        held = found.reserved_bytes[0] / found.allocated_bytes[0]
        forecast = Forecast(found.moments, found.step, card.rates, found.context_bytes, held)
        if host_memory is not None:
            forecast.host_memory = host_memory
    needed = found.held_bytes + found.context_bytes
    return Search(techniques, needed, card.usable_bytes, runs, seconds(found.step, card.rates), forecast)


def _worth_trying(found: Estimate, card: Card, backend: str, disk: str | None) -> Iterator[str]:
    # Of the allocators the one that holds the least: others take what it takes, and more.
    others = [one for one in found.backends if one.name != backend and one.reserved_bytes < found.held_bytes]
    if not found.backends and backend == "native":
        yield "expandable"
    if others:
        yield min(others, key=lambda one: (not one.completes, one.reserved_bytes)).name
    if found.steps:
        yield from (FUSED, EIGHT_BITS, FOUR_BITS, FACTORED)
        yield from (OFFLOAD_STATES, OFFLOAD_GRADIENTS, STEP_IN_BACKWARD)
        if disk is not None:
            yield f"{STATES_ON_DISK}:{disk}"
        room = card.usable_bytes - found.context_bytes
        budget = max(1, min(int(_BUDGET * room), room - PAGES) >> 20)  # its least is taken where that is more
        yield from (f"{CHECKPOINT}:{budget << 20}", LEAST)
        yield from (OFFLOAD_ACTIVATIONS, CODED_ACTIVATIONS, LOSS_HEAD, TILES, BF16)
    if found.by_category.get("parameters"):
        yield OFFLOAD_LAYERS


def _advice(search: Search, names: Names) -> Advice:
    tried = search.run(names)
    assert tried is not None and tried.answer is not None
    changes = dict.fromkeys(CHANGES[name] for name in sorted(names) if name in CHANGES)
    return Advice(
        " + ".join(in_words(names, tried.answer.more["techniques"])),
        tried.answer.peak_allocated,
        ", ".join(changes),
    )


def in_words(
    names: Collection[str],
    met: Mapping[str, list[str]],
    keeps: Collection[str] = KEEPS,
    host_memory: int | None = None,
) -> list[str]:
    """Return what a user would write for techniques. met: by technique, what it applies to. The rest is as a plan has
    it."""
    options = of_optimizers(names)
    ordered = sorted(names, key=lambda name: (-tier_of([name]), name))
    others = [name for name in ordered if name not in options and name not in _SWITCH]
    what = [_in_words(name, met, keeps, host_memory) for name in others]
    if options:
        kinds = ", ".join(dict.fromkeys(kind for name in sorted(options) for kind in met[plain(name)]))
        what.insert(0, f"memopt.optim.{kinds}(..., {in_code(options_of(options))})")
        if OFFLOAD_GRADIENTS in options:
            what.insert(1, "memopt.amp's clip_grad_norm_ and GradScaler, where it clips or scales")
    return what + [_SWITCH[name] for name in ordered if name in _SWITCH]


def _in_words(
    name: str, met: Mapping[str, list[str]], keeps: Collection[str], host_memory: int | None
) -> str:
    technique, _, size = name.partition(":")
    of = ", ".join(met[technique])
    budget = _mebibytes(met.get(LEAST_BUDGET, [size])[0])
    keep = f"keep={_mebibytes(size)}" if size else ""
    kept = "accumulate=True, " if GRADIENTS in keeps else ""
    kept += "" if OUTPUT in keeps else "keeps_output=False, "
    limit = "" if host_memory is None else f', host_memory="{host_memory >> 20}MiB"'
    return {
        FUSED: f"torch.optim.{of}(..., fused=True)",
        OFFLOAD_ACTIVATIONS: f"memopt.offload_activations({keep}) around the forward pass",
        CODED_ACTIVATIONS: f'memopt.offload_activations(to="8bit"{keep and ", " + keep}) around the forward pass',
        BF16: 'torch.autocast("cuda", torch.bfloat16) around the forward pass and the loss',
        LOSS_HEAD: "memopt.nn.linear_cross_entropy(rows, head.weight, targets, head.bias) instead of the head and its "
        "cross_entropy (memopt.nn.fuse_loss_head(model) for a model of transformers)",
        TILES: "memopt.nn.tile_mlps(model)",
        OFFLOAD_LAYERS: "memopt.offload_layers(model) before the optimizer is made",
        CHECKPOINT: f"memopt.auto_checkpoint(model, sample, memory_budget={budget}, "
        f'optimizer=optimizer, {kept}to="cpu"{limit})',
    }[technique]


def _mebibytes(size: str) -> str:
    return f'"{-(-int(size or 0) // (1 << 20))}MiB"'
