"""torch's two operations of a gradient scaler: unscaling in one pass over all gradients, and the scale's update with
bounds, hysteresis and a repair that its users have asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.originals import original

__all__ = ["SMALLEST_SCALE", "foreach_unscale_", "torchs_gradients", "torchs_pass", "update_scale_"]

torchs_unscale_ = original(torch, "_amp_foreach_non_finite_check_and_unscale_")


def foreach_unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients in place, as a drop-in for torch._amp_foreach_non_finite_check_and_unscale_.

    Multiplies every gradient by inv_scale, and sets found_inf to 1.0 if any of their elements was infinite or NaN
    before that; found_inf is never cleared.

    Dense tensors go through memopt's kernels, on the CPU and on CUDA: one pass over all of them, whatever their number
    and types, bf16 included (which torch's op refuses on CUDA up to 2.13). Where inv_scale is 1 nothing is written.
    Everything else (sparse, strided with gaps, subclasses, a scale on another device) is passed to torch's op, with its
    errors.

    Args:
        grads: Tensors on found_inf's device.
        found_inf: One fp32.
        inv_scale: One fp32, read on the device, so the host does not wait.

    Raises:
        ImportError: PyTorch is older than 2.10.
        memopt.Error: The kernels cannot be loaded.

    Examples:
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
    """Return the device of both scalars (-1: the CPU), if each is one plain fp32; None where torch's op words the
    error."""
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


SMALLEST_SCALE = 2.0**-126
"""The least scale that repair=True leaves: the smallest normal fp32, whose reciprocal is finite."""

torchs_update_ = original(torch, "_amp_update_scale_")


def update_scale_(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
    repair: bool = False,
) -> Tensor:
    """Update a gradient scale, as a drop-in for torch._amp_update_scale_.

    The scale backs off where found_inf is not 0, and grows after growth_interval calls where it is 0. This happens in
    place and on the device, so the host does not wait.

    Args:
        current_scale: The scale, one fp32; changed in place.
        growth_tracker: The number of calls without an inf, one int32; changed in place.
        found_inf: One fp32, not 0 where gradients had an inf or a NaN.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which the scale backs off.
        growth_interval: The number of consecutive calls without an inf after which the scale grows.
        min_scale: The smallest scale.
        max_scale: The largest scale.
        hysteresis: The number of consecutive calls with found_inf set after which the scale backs off.
        hysteresis_tracker: One int32 on growth_tracker's device that counts them; initially equal to hysteresis.
        repair: Whether to keep the scale's reciprocal finite (the scale stays above 2**-126), and to let a tracker that
            has passed the interval, because the interval was lowered, count as having reached it (torch's function
            would never grow the scale again).

    Returns:
        current_scale.

    Raises:
        ValueError: hysteresis is below 1, or above 1 without a tracker.

    Examples:
        >>> memopt.amp.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000, max_scale=2.0**24)
    """
    if hysteresis < 1:
        raise ValueError(
            f"hysteresis={hysteresis}: expected at least 1, with which each found_inf backs the scale off"
        )
    if hysteresis > 1 and hysteresis_tracker is None:
        raise ValueError(f"hysteresis={hysteresis} needs a hysteresis_tracker, an int32 tensor of that value")
    if repair:
        growth_tracker.clamp_(max=max(growth_interval - 1, 0))
        min_scale = SMALLEST_SCALE if min_scale is None else max(min_scale, SMALLEST_SCALE)

    # Kernels only, no copy, not even on the device: so it is plain in a trace that nothing goes to the host.
    before = current_scale + 0.0 if hysteresis > 1 else None
    torchs_update_(current_scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    if before is not None and hysteresis_tracker is not None:
        bad = (found_inf != 0).reshape_as(hysteresis_tracker)
        fresh = torch.full_like(hysteresis_tracker, hysteresis)
        torch.where(bad, hysteresis_tracker - 1, fresh, out=hysteresis_tracker)
        torch.where(bad & (hysteresis_tracker > 0), before, current_scale, out=current_scale)
    if min_scale is not None or max_scale is not None:
        current_scale.clamp_(min_scale, max_scale)
    return current_scale
