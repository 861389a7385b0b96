"""Activation checkpointing: intermediate results that are recomputed in the backward pass instead of being kept.

checkpoint, checkpoint_sequential and create_selective_checkpoint_contexts are drop-ins for torch.utils.checkpoint, with
the same signatures, results and errors.
"""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    from memopt._checkpoint.drop_in.checkpoint import checkpoint
    from memopt._checkpoint.drop_in.selective import create_selective_checkpoint_contexts
    from memopt._checkpoint.drop_in.sequential import checkpoint_sequential

__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "set_checkpoint_early_stop",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "checkpoint": "memopt._checkpoint.drop_in.checkpoint",
        "checkpoint_sequential": "memopt._checkpoint.drop_in.sequential",
        "create_selective_checkpoint_contexts": "memopt._checkpoint.drop_in.selective",
        "set_checkpoint_early_stop": "torch.utils.checkpoint",  # one setting for torch's regions and memopt's
    },
    torch_for="memopt",
)
