"""Mixed precision: what torch.amp and torch.nn.utils do to gradients, in fewer passes over memory. Drop-ins: the same
signatures, results and errors."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.amp.clip import clip_grad_norm_
    from memopt.amp.foreach_unscale import foreach_unscale_
    from memopt.amp.grad_scaler import GradScaler
    from memopt.amp.update_scale import update_scale_

__all__ = ["GradScaler", "clip_grad_norm_", "foreach_unscale_", "update_scale_"]

# Their modules hold torch's functions, and import torch, which importing memopt.amp must not.
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "GradScaler": "memopt.amp.grad_scaler",
        "clip_grad_norm_": "memopt.amp.clip",
        "foreach_unscale_": "memopt.amp.foreach_unscale",
        "update_scale_": "memopt.amp.update_scale",
    },
    torch_for="memopt.amp",
)
