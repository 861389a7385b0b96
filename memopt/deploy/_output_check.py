"""The comparison of an exported model's outputs with the live one's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

# The largest difference that is let pass, as a share of the largest value of the output: another runtime sums in
# another order, and what comes of that grows with the depth. A thousand steps of float32, some ten of short types.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

Tolerance = float | Mapping[torch.dtype, float] | None


class OutputsDiffer(RuntimeError):
    """An exported model's outputs are not the live model's. The message names the output and by how much."""


@dataclass(frozen=True)
class Check:
    """The comparison of outputs on one sample.

    `difference`: the largest of any output, as a share of its largest value; 0 where they are bit-equal. `tolerance`:
    what was let pass of that output.
    """

    sample: str
    outputs: int
    difference: float
    tolerance: float
    dtype: torch.dtype | None


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in whatever a model returns, in order."""
    return [leaf for leaf in pytree.tree_leaves(_plain(outputs)) if isinstance(leaf, torch.Tensor)]


def _plain(outputs: Any) -> Any:
    """Return mappings whose class pytree does not know (such as Hugging Face's outputs) as dicts."""
    if isinstance(outputs, Mapping) and type(outputs) is not dict:
        return {name: _plain(value) for name, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return [_plain(value) for value in outputs]
    if isinstance(outputs, dict):
        return {name: _plain(value) for name, value in outputs.items()}
    return outputs


def tolerance_of(dtype: torch.dtype, wanted: Tolerance) -> float:
    """Return the tolerance of a dtype, 0 if outputs must be equal."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if isinstance(wanted, Mapping):
        return wanted.get(dtype, wanted.get(real, TOLERANCE.get(real, 0.0)))
    if not real.is_floating_point:
        return 0.0
    return wanted if wanted is not None else TOLERANCE.get(real, 0.0)


def compare(sample: str, live: list[torch.Tensor], exported: list[torch.Tensor], wanted: Tolerance) -> Check:
    """Compare the outputs. Raises OutputsDiffer."""
    if len(live) != len(exported):
        raise OutputsDiffer(f"{sample}: {len(exported)} outputs, but the live model gives {len(live)}")
    worst = Check(sample, len(live), 0.0, 0.0, None)
    for number, (expected, found) in enumerate(zip(live, exported, strict=True)):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            raise OutputsDiffer(
                f"{sample}: output {number} is {_form(found)}, but the live model gives {_form(expected)}"
            )
        allowed = tolerance_of(expected.dtype, wanted)
        difference = largest_difference(expected, found)
        if not difference <= allowed:
            raise OutputsDiffer(
                f"{sample}: output {number} ({_form(expected)}) differs by {difference:.2g} of its largest value from "
                f"the live model's, more than the {allowed:.2g} allowed: tolerance= allows more"
            )
        if worst.dtype is None or difference - allowed > worst.difference - worst.tolerance:
            worst = Check(sample, len(live), difference, allowed, expected.dtype)
    return worst


def largest_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, as a share of the largest finite value expected; inf where only one of two is finite."""
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return float((expected != found).double().mean())
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b = expected.to(wide), found.to(wide)
    finite = a.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((finite & b.isfinite() | same).all()):
        return float("inf")
    distance = (a - b)[finite].abs()
    if not distance.numel():
        return 0.0
    largest = float(a[finite].abs().max())
    return float(distance.max()) / (largest or 1.0)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
