"""Parts of a model in less memory: the loss head, MLPs."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.nn._fuse_loss_head import fuse_loss_head
    from memopt.nn._linear_cross_entropy import linear_cross_entropy
    from memopt.nn._tile_mlps import tile_mlps

__all__ = ["fuse_loss_head", "linear_cross_entropy", "tile_mlps"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "fuse_loss_head": "memopt.nn._fuse_loss_head",
        "linear_cross_entropy": "memopt.nn._linear_cross_entropy",
        "tile_mlps": "memopt.nn._tile_mlps",
    },
    torch_for="memopt.nn",
)
