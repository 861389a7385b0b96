"""torch._amp_foreach_non_finite_check_and_unscale_, in one pass over all gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.originals import original

__all__ = ["foreach_unscale_", "torchs_gradients", "torchs_pass"]

torchs_unscale_ = original(torch, "_amp_foreach_non_finite_check_and_unscale_")


def foreach_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients in place, as a drop-in for torch._amp_foreach_non_finite_check_and_unscale_.

    Multiplies every gradient by inv_scale, and sets found_inf to 1.0 if any of their elements was infinite or NaN
    before that; found_inf is never cleared.

    Dense tensors go through memopt's kernels, on the CPU and on CUDA: one pass over all of them, whatever their number
    and types, bf16 included (which torch's op refuses on CUDA up to 2.13). Where inv_scale is 1 nothing is written. All
    else (sparse, strided with gaps, subclasses, a scale that is elsewhere) is passed to torch's op, errors included.

    Args:
        grads: Tensors on found_inf's device.
        found_inf: One fp32.
        inv_scale: One fp32, read on the device, so the host does not wait.

    Raises:
        ImportError: PyTorch is older than 2.10.
        memopt.Error: The kernels cannot be loaded.

    Example:
        >>> memopt.amp.foreach_unscale_([p.grad for p in model.parameters()], found_inf, inv_scale)
    """
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
    """The device that both are on (-1: the CPU), one plain fp32 each; None where torch's op words the error."""
    for t in (found_inf, inv_scale):
        if type(t) is not torch.Tensor or not (t.is_cpu or t.is_cuda):
            return None
        if t.dtype != torch.float32 or t.numel() != 1:
            return None
    device: int = found_inf.get_device()
    return device if inv_scale.get_device() == device else None


def torchs_gradients(parameters: Iterable[Any], allow_fp16: bool) -> list[Tensor]:
    """Return the tensors that torch's scaler would work on; with its errors, in its order."""
    collected = []
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
        if parameter.grad is None:
            continue
        if not allow_fp16 and parameter.grad.dtype == torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if parameter.grad.is_sparse:
            # Elements with the same indices add up, and in fp16 their sum may overflow: that is to be found.
            if parameter.grad.dtype is torch.float16:
                parameter.grad = parameter.grad.coalesce()
            collected.append(parameter.grad._values())
        else:
            collected.append(parameter.grad)
    return collected


def torchs_pass(grads: list[Tensor], founds: dict[torch.device, Tensor], inv_scale: Tensor | None) -> None:
    """Run torch's op, a call for each device and type."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        buckets[grad.device, grad.dtype].append(grad)
    with torch.no_grad():
        for (device, _), bucket in buckets.items():
            inverse = (
                torch.ones((), device=device)
                if inv_scale is None
                else inv_scale.to(device, non_blocking=True)
            )
            torchs_unscale_(bucket, founds[device], inverse)
