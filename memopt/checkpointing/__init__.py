"""Activation checkpointing: what of a forward pass is not kept for the backward pass, and made again in it. Drop-ins
for torch.utils.checkpoint: the same signatures, results and errors."""

from __future__ import annotations

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

_HOMES = {
    "checkpoint": "memopt.checkpointing.regions",
    "checkpoint_sequential": "memopt.checkpointing.sequential",
    "create_selective_checkpoint_contexts": "memopt.checkpointing.selective",
    "set_checkpoint_early_stop": "torch.utils.checkpoint",  # one setting for torch's regions and memopt's
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from memopt.torch_version import require

    require(f"memopt.{name}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
