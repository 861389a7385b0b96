"""Activation checkpointing: what of a forward pass is not kept for the backward pass, and made again in it. Drop-ins
for torch.utils.checkpoint: the same signatures, results and errors."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    from memopt.checkpointing.regions import checkpoint
    from memopt.checkpointing.selective import create_selective_checkpoint_contexts
    from memopt.checkpointing.sequential import checkpoint_sequential

__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "set_checkpoint_early_stop",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "checkpoint": "memopt.checkpointing.regions",
        "checkpoint_sequential": "memopt.checkpointing.sequential",
        "create_selective_checkpoint_contexts": "memopt.checkpointing.selective",
        "set_checkpoint_early_stop": "torch.utils.checkpoint",  # one setting for torch's regions and memopt's
    },
    torch_for="memopt",
)
