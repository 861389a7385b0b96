"""torch._amp_foreach_non_finite_check_and_unscale_, in one pass over all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopt import _C, kernels
from memopt.originals import original

__all__ = ["foreach_unscale_", "torchs_unscale_"]

torchs_unscale_ = original(torch, "_amp_foreach_non_finite_check_and_unscale_")


def foreach_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A drop-in for torch._amp_foreach_non_finite_check_and_unscale_: multiplies every gradient by inv_scale
    in place, and sets found_inf to 1.0 if any of their elements was infinite or NaN before that (it is never
    cleared).

    Dense tensors go through memopt's kernels, on the CPU and on CUDA: one pass over all of them, whatever their
    number and types, bf16 included (which torch's op refuses on CUDA up to 2.13). Where inv_scale is 1 nothing is
    written. All else (sparse, strided with gaps, subclasses, a scale that is elsewhere) is passed to torch's op,
    errors included.

    grads: tensors on found_inf's device. found_inf, inv_scale: one fp32 each; inv_scale is read on the
    device, so the host does not wait. Raises ImportError without PyTorch >= 2.10, memopt.Error where the
    kernels cannot be loaded."""
    device = _device_of_scalars(found_inf, inv_scale)
    theirs = list(grads)
    gradients = _C.Gradients(theirs if device is not None else [])
    if device is not None:
        elsewhere = (number for number in gradients.devices if number != device)
        theirs = [*gradients.others, *(grad for number in elsewhere for grad in gradients.tensors(number))]
    # torch's op goes first: what it refuses, it refuses before anything has changed.
    if theirs or device not in gradients.devices:
        torchs_unscale_(theirs, found_inf, inv_scale)
    if device is not None and device in gradients.devices:
        kernels.prepare()
        gradients.run(device, store=True, inv_scale=inv_scale, found_inf=found_inf)


def _device_of_scalars(found_inf: Tensor, inv_scale: Tensor) -> int | None:
    """The device that both are on (-1: the CPU), one plain fp32 each; None where torch's op had better say what
    is wrong."""
    for t in (found_inf, inv_scale):
        if type(t) is not torch.Tensor or not (t.is_cpu or t.is_cuda):
            return None
        if t.dtype != torch.float32 or t.numel() != 1:
            return None
    device: int = found_inf.get_device()
    return device if inv_scale.get_device() == device else None
