"""torch._amp_update_scale_, and what its users have asked of it since."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.originals import original

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
    """A drop-in for torch._amp_update_scale_: backs the scale off where found_inf is not 0, and else grows it after
    growth_interval calls; in place, on the device, so the host does not wait. Returns current_scale.

    min_scale, max_scale: what the scale is kept within. hysteresis: how many calls in a row with a found_inf it takes
    to back off; hysteresis_tracker, an int32 beside growth_tracker that was filled with hysteresis, counts them.
    repair: the scale keeps a finite reciprocal (it stays above 2**-126), and a tracker that is past the interval, since
    the interval was lowered, counts as having reached it (torch's would never grow the scale again)."""
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
