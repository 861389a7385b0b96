"""Functions of torch.nn.functional in less memory."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memopt.nn._linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]

__getattr__, __dir__ = lazy_names(
    globals(), {"linear_cross_entropy": "memopt.nn._linear_cross_entropy"}, torch_for="memopt.nn"
)
