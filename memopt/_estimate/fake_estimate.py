"""An estimate from fake tensors, with ranges: no allocator and no CUDA code has run."""

from __future__ import annotations

from memopt._estimate import cards
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.prediction import FAKE, Estimate

# Where no allocator has run: what CUDA's kernels keep may be so much more or less, and what the allocator holds so much
# more than it hands out. Of a few models the first was seen to be off by 7 %, the second to be 1.0 to 1.3.
_OFF = 0.1
_HELD = 1.3
_WORKSPACES = {True: 64 << 20, False: 17 << 20}  # cuBLAS's two, from compute capability 9.0 on, and before


def made_of(answer: Answer, title: str, card: Card | None, reason: str) -> Estimate:
    """Make the estimate. `reason`: why it was not the simulated device, "" if fake tensors were asked for."""
    found = Estimate(
        title=title,
        method=FAKE,
        allocated=(int(answer.peak_allocated * (1 - _OFF)), _at_most(answer, card)),
        reserved=(int(answer.peak_allocated * (1 - _OFF)), held_at_most(answer, card)),
        context=card.context if card else cards.CONTEXT,
        card=card,
        by_category=answer.by_category,
        by_line=answer.by_line,
        by_module=answer.by_module,
        guesses=answer.guesses,
        unknowns=[
            f"what CUDA's kernels keep: {_OFF:.0%} more or less; what the allocator holds: {_HELD - 1:.0%} more; "
            "cuDNN's workspaces are not counted"
        ],
        unmodelled=[f"not on the simulated device: {reason}"] if reason else [],
        steps=answer.steps,
        versions=answer.versions,
        runs=1,
        seconds=answer.seconds,
    )
    if card is not None:
        fits = [needed <= card.usable for needed in found.needed]
        found.verdict = "fits" if all(fits) else "unsure" if any(fits) else "does not fit"
    return found


def held_at_most(answer: Answer, card: Card | None) -> int:
    return int(_at_most(answer, card) * _HELD)


def _at_most(answer: Answer, card: Card | None) -> int:
    newer = card is not None and float(card.compute_capability) >= 9
    return int(answer.peak_allocated * (1 + _OFF)) + _WORKSPACES[newer]
