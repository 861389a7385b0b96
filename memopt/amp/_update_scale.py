"""torch._amp_update_scale_, with bounds, hysteresis and a repair that its users have asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt._runtime.originals import original

__all__ = ["SMALLEST_SCALE", "update_scale_"]

SMALLEST_SCALE = 2.0**-126
"""What repair=True keeps a scale from falling below: the smallest normal fp32, whose reciprocal is finite."""

_torchs = original(torch, "_amp_update_scale_")


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

    The scale is backed off where found_inf is not 0, and grows after growth_interval calls without; in place and on the
    device, so the host does not wait.

    Args:
        current_scale: The scale, one fp32; changed in place.
        growth_tracker: The number of calls without an inf, one int32; changed in place.
        found_inf: One fp32, not 0 where gradients had an inf or a NaN.
        growth_factor: What the scale is multiplied by to grow.
        backoff_factor: What the scale is multiplied by to back off.
        growth_interval: The number of calls in a row without an inf after which the scale grows.
        min_scale: The least scale.
        max_scale: The largest scale.
        hysteresis: The number of calls in a row with a found_inf that it takes to back off.
        hysteresis_tracker: An int32 beside growth_tracker, filled with hysteresis at first, that counts them.
        repair: Keep the scale's reciprocal finite (the scale stays above 2**-126), and let a tracker that is past the
            interval, since the interval was lowered, count as having reached it (torch's would never grow the scale
            again).

    Returns:
        current_scale.

    Raises:
        ValueError: hysteresis is below 1, or needs a tracker and has none.

    Example:
        >>> memopt.amp.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000, max_scale=2.0**24)
    """
    if hysteresis < 1:
        raise ValueError(f"hysteresis={hysteresis}: at least 1, where each found_inf backs the scale off")
    if hysteresis > 1 and hysteresis_tracker is None:
        raise ValueError(f"hysteresis={hysteresis} needs a hysteresis_tracker, an int32 tensor of that value")
    if repair:
        growth_tracker.clamp_(max=max(growth_interval - 1, 0))
        min_scale = SMALLEST_SCALE if min_scale is None else max(min_scale, SMALLEST_SCALE)

    # Kernels only, no copy, not even on the device: so it is plain in a trace that nothing goes to the host.
    before = current_scale + 0.0 if hysteresis > 1 else None
    _torchs(current_scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    if before is not None and hysteresis_tracker is not None:
        bad = (found_inf != 0).reshape_as(hysteresis_tracker)
        fresh = torch.full_like(hysteresis_tracker, hysteresis)
        torch.where(bad, hysteresis_tracker - 1, fresh, out=hysteresis_tracker)
        torch.where(bad & (hysteresis_tracker > 0), before, current_scale, out=current_scale)
    if min_scale is not None or max_scale is not None:
        current_scale.clamp_(min_scale, max_scale)
    return current_scale
