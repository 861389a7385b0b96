"""What would make it fit, with what each saves: tried in a run of its own, or worked out from the figures."""

from __future__ import annotations

from memopt import _C
from memopt.estimation import cards
from memopt.estimation.prediction import Advice, Estimate
from memopt.oom import eight_bit_states

_SWITCH = {
    "native": "the native allocator",
    "expandable": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "pool": 'memopt.enable(backend="pool")',
}


def from_figures(found: Estimate) -> list[Advice]:
    """For an estimate that does not fit its card, what a run has shown first."""
    card = found.card
    if card is None:
        return []
    listed = [
        Advice(_SWITCH[backend.name], max(0, found.backends[0].reserved - backend.reserved), tried=True)
        for backend in found.backends[1:]
        if backend.completes
    ]
    batch = found.largest_batch
    if batch and batch["size"] and batch["now"] and batch["size"] < batch["now"]:
        listed.append(Advice(f"batch {batch['size']} instead of {batch['now']}", None, tried=True))
    lacking = found.needed[1] - card.usable
    # Two states beside each parameter and gradient: Adam's, of 32 bits where the parameters are.
    states, parameters = found.by_category.get("optimizer", 0), found.by_category.get("parameters", 0)
    if states > 1.5 * parameters > 0:
        saved = eight_bit_states.saved(states)
        listed.append(
            Advice("memopt.optim.AdamW(..., state_bits=8)", saved, tried=False, enough=saved >= lacking)
        )
    kept = found.by_category.get("activations", 0)
    budget = card.usable - card.context - (found.reserved[1] - found.allocated[1])
    if 0 < lacking < kept and budget > 0:
        size = f"{budget >> 20}MiB"
        listed.append(
            Advice(f'memopt.auto_checkpoint(model, sample, memory_budget="{size}")', lacking, tried=False)
        )
    larger = cards.smallest_with(found.needed[1])
    if larger is not None and larger.usable > card.usable:
        listed.append(
            Advice(f"a card of {_C.format_size(larger.usable)}, as {larger.name}", None, tried=False)
        )
    return listed
