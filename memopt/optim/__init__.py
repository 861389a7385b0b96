"""Optimizers in one pass: torch.optim's, with the gradients' scale, the clip coefficient and the overflow
flag of a gradient scaler read where the update happens, and with optimizer states of 8 bits."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.optim.adam import Adam
    from memopt.optim.adamw import AdamW
    from memopt.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # They are subclasses of torch's, which importing memopt.optim must not need.
    from importlib import import_module

    from memopt import torch_version

    torch_version.require(f"memopt.optim.{name}")
    globals()[name] = made = getattr(import_module(f"memopt.optim.{name.lower()}"), name)
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
