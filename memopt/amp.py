"""Mixed precision: the pieces of torch.amp that memopt does in fewer passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt import _C, kernels, torch_version

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["foreach_unscale_"]


def foreach_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A drop-in for torch._amp_foreach_non_finite_check_and_unscale_: multiplies every gradient by inv_scale
    in place, and sets found_inf to 1.0 if any of their elements was infinite or NaN before that (it is never
    cleared).

    Dense CUDA tensors go through memopt's kernel: one launch an element type, whatever their number, bf16
    included (which torch's op refuses on CUDA up to 2.13). Where inv_scale is 1 nothing is written. All else
    (sparse, strided with gaps, subclasses, CPU, a scale that is elsewhere) is passed to torch's op, errors
    included.

    grads: tensors on found_inf's device. found_inf, inv_scale: one fp32 each; inv_scale is read on the
    device, so the host does not wait. Raises ImportError without PyTorch >= 2.10, memopt.Error where the
    kernels cannot be loaded."""
    torch_version.require("memopt.amp.foreach_unscale_")
    import torch

    ours: dict[int, list[Tensor]] = {}
    theirs: list[Tensor] = []
    if _is_device_scalar(found_inf) and _is_device_scalar(inv_scale) and found_inf.device == inv_scale.device:
        for grad in grads:
            kind = _kind(grad) if grad.device == found_inf.device else None
            if kind is None:
                theirs.append(grad)
            else:
                ours.setdefault(kind, []).append(grad)
    else:
        theirs = list(grads)

    # torch's op goes first: what it refuses, it refuses before anything has changed.
    if theirs or not ours:
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
    if ours:
        kernels.prepare()
        stream = torch.cuda.current_stream(found_inf.device).cuda_stream
        for kind, tensors in ours.items():
            _C.foreach_unscale_cuda(
                array("Q", [t.data_ptr() for t in tensors]), array("Q", [t.numel() for t in tensors]), kind,
                inv_scale.data_ptr(), found_inf.data_ptr(), found_inf.device.index, stream,
            )  # fmt: skip


def _is_device_scalar(t: Tensor) -> bool:
    import torch

    return type(t) is torch.Tensor and t.is_cuda and t.dtype == torch.float32 and t.numel() == 1


def _kind(grad: Tensor) -> int | None:
    """The kernel's number for a gradient's element type; None where the kernel must not touch it: it takes
    the memory from the first element on for numel() elements without a gap."""
    import torch

    if (
        type(grad) not in (torch.Tensor, torch.nn.Parameter)
        or grad.layout is not torch.strided
        or grad.is_neg()
    ):
        return None
    kinds = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
    kind = kinds.get(grad.dtype)
    if kind is None or not (
        grad.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(grad)
    ):
        return None
    return kind
