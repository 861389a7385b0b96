"""Functions of torch.nn.functional in less memory."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.nn._fuse_loss_head import fuse_loss_head
    from memopt.nn._linear_cross_entropy import linear_cross_entropy

__all__ = ["fuse_loss_head", "linear_cross_entropy"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "fuse_loss_head": "memopt.nn._fuse_loss_head",
        "linear_cross_entropy": "memopt.nn._linear_cross_entropy",
    },
    torch_for="memopt.nn",
)
