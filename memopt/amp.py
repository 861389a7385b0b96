"""Mixed precision: the pieces of torch.amp that memopt does in fewer passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from memopt import _C, kernels, torch_version

if TYPE_CHECKING:
    from torch import Tensor, dtype

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
    torch, kinds = _torch()
    ours: dict[int, list[Tensor]] = {}
    theirs: list[Tensor] = []
    device = _device_of_scalars(found_inf, inv_scale)
    if device is None:
        theirs = list(grads)
    else:
        for grad in grads:
            # The kernel takes the memory from the first element on for numel() elements, as it is: a gradient must be
            # dense, of a known type, with nothing lazy about it (a subclass, a negation), and on that device.
            kind = kinds.get(grad.dtype)
            if (
                kind is not None
                and (type(grad) is torch.Tensor or type(grad) is torch.nn.Parameter)
                and grad.layout is torch.strided
                and grad.is_cuda
                and grad.get_device() == device
                and not grad.is_neg()
                and (grad.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(grad))
            ):
                ours.setdefault(kind, []).append(grad)
            else:
                theirs.append(grad)

    # torch's op goes first: what it refuses, it refuses before anything has changed.
    if theirs or not ours:
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
    if ours and device is not None:
        kernels.prepare()
        stream = torch.cuda.current_stream(device).cuda_stream
        for kind, tensors in ours.items():
            addresses = array("Q", [t.data_ptr() for t in tensors])
            counts = array("Q", [t.numel() for t in tensors])
            _C.foreach_unscale_cuda(
                addresses, counts, kind, inv_scale.data_ptr(), found_inf.data_ptr(), device, stream
            )


@cache
def _torch() -> tuple[ModuleType, dict[dtype, int]]:
    """torch, and the kernel's number for each type that it knows. Asked for at first use: importing
    memopt.amp must not need torch."""
    torch_version.require("memopt.amp.foreach_unscale_")
    import torch

    return torch, {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def _device_of_scalars(found_inf: Tensor, inv_scale: Tensor) -> int | None:
    """The CUDA device that both are on, one plain fp32 each; None where torch's op had better say what is
    wrong."""
    torch, _ = _torch()
    for t in (found_inf, inv_scale):
        if type(t) is not torch.Tensor or not t.is_cuda or t.dtype != torch.float32 or t.numel() != 1:
            return None
    device: int = found_inf.get_device()
    return device if inv_scale.get_device() == device else None
