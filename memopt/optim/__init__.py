"""Optimizers in one pass: torch.optim's, with the gradients' scale, the clip coefficient and the overflow
flag of a gradient scaler read where the update happens, and with optimizer states of 8 bits."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.optim.adam import Adam
    from memopt.optim.adamw import AdamW
    from memopt.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]

# They are subclasses of torch's, which importing memopt.optim must not need.
__getattr__, __dir__ = lazy_names(
    globals(),
    {"SGD": "memopt.optim.sgd", "Adam": "memopt.optim.adam", "AdamW": "memopt.optim.adamw"},
    torch_for="memopt.optim",
)
