"""Mixed precision: what torch.amp and torch.nn.utils do to gradients, in fewer passes over memory. Drop-ins: the same
signatures, results and errors."""

from __future__ import annotations

from memopt.amp.clip import clip_grad_norm_
from memopt.amp.foreach_unscale import foreach_unscale_
from memopt.amp.update_scale import update_scale_

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_", "foreach_unscale_", "update_scale_"]


def __getattr__(name: str) -> object:
    if name == "GradScaler":  # a subclass of torch's, which importing memopt.amp must not need
        from memopt import torch_version

        torch_version.require("memopt.amp.GradScaler")
        from memopt.amp.grad_scaler import GradScaler

        globals()[name] = GradScaler
        return GradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
