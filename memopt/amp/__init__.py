"""Mixed precision: the gradient operations of torch.amp and torch.nn.utils, in fewer passes over memory.

Drop-ins: the same signatures, results and errors.
"""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.amp._clip import clip_grad_norm_
    from memopt.amp._grad_scaler import GradScaler
    from memopt.amp._scaling import foreach_unscale_, update_scale_

__all__ = ["GradScaler", "clip_grad_norm_", "foreach_unscale_", "update_scale_"]

# Their modules hold torch's functions, and import torch, which importing memopt.amp must not.
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "GradScaler": "memopt.amp._grad_scaler",
        "clip_grad_norm_": "memopt.amp._clip",
        "foreach_unscale_": "memopt.amp._scaling",
        "update_scale_": "memopt.amp._scaling",
    },
    torch_for="memopt.amp",
)
