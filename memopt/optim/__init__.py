"""Optimizers in one pass over memory, with torch.optim's arguments and results.

The update itself reads a gradient scaler's scale, clip coefficient and overflow flag; optimizer states may have 8 bits.
"""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.optim._adam import Adam, AdamW
    from memopt.optim._muon import Muon
    from memopt.optim._sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon"]

# They are subclasses of torch's, which importing memopt.optim must not need.
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "SGD": "memopt.optim._sgd",
        "Adam": "memopt.optim._adam",
        "AdamW": "memopt.optim._adam",
        "Muon": "memopt.optim._muon",
    },
    torch_for="memopt.optim",
)
