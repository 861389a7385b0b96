"""The learning rate for another batch size.

"linear": SGD takes k times the rate for k times the batch, after some epochs of warm-up (Goyal et al. 2017,
arXiv:1706.02677, section 2.1; Krizhevsky 2014, arXiv:1404.5997, uses it). "sqrt": sqrt(k) times, which keeps the
variance of an update (Krizhevsky 2014, section 5; Hoffer et al. 2017, arXiv:1705.08741, section 4), and is what the
adaptive methods want (You et al. 2019, arXiv:1904.00962; Malladi et al. 2022, arXiv:2205.10287). "adam": that with what
goes with it in Malladi et al.: 1 - beta is k times, eps 1/sqrt(k) times what it was. All are rules for batches that are
small beside the noise of their gradient; beyond the critical batch size none holds (McCandlish et al. 2018,
arXiv:1812.06162).
"""

from __future__ import annotations

import math
from typing import Any

import torch

RULES = ("linear", "sqrt", "adam")


def scaled_learning_rate(lr: float, from_batch: int, to_batch: int, rule: str = "linear") -> float:
    """Scale a learning rate for another batch size.

    Args:
        lr: The rate that was right for from_batch.
        from_batch: Samples a step, over all ranks and all accumulated batches.
        to_batch: Samples a step for which the rate is wanted.
        rule: "linear", "sqrt", or "adam" (which is "sqrt" for the rate itself).

    Returns:
        The rate for to_batch.

    Raises:
        ValueError: The rule is unknown, or a size is below 1.
    """
    return lr * _factor(from_batch, to_batch, rule)


def rescale_learning_rate_(
    optimizer: torch.optim.Optimizer, from_batch: int, to_batch: int, rule: str | None = None
) -> dict[str, list[float]]:
    """Change an optimizer's learning rates in place, group by group, for another batch size.

    The rates that schedulers start from ("initial_lr") change too. An existing scheduler has its own copy of them
    (base_lrs): create schedulers afterwards.

    Args:
        optimizer: The optimizer.
        from_batch: Samples a step until now, over all ranks and all accumulated batches.
        to_batch: Samples a step from now on.
        rule: By default "sqrt" for optimizers with betas (Adam, AdamW, Lion and others), "linear" for the rest. "adam"
            changes betas and eps with the rate.

    Returns:
        The rates: {"before": [lr of each group], "after": [...]}.

    Raises:
        ValueError: A size is below 1, the rule is unknown, it is "adam" and the optimizer has no betas, or the change
            is so large that a beta would be negative. Nothing has changed then.
    """
    adaptive = all("betas" in group for group in optimizer.param_groups)
    rule = rule or ("sqrt" if adaptive else "linear")
    factor = _factor(from_batch, to_batch, rule)
    betas: list[Any] = []
    if rule == "adam":
        if not adaptive:
            raise ValueError(
                f'rule="adam" changes betas, but {type(optimizer).__name__} has none: use "linear" or "sqrt"'
            )
        k = to_batch / from_batch
        betas = [tuple(1 - k * (1 - beta) for beta in group["betas"]) for group in optimizer.param_groups]
        if any(not 0 <= beta < 1 for pair in betas for beta in pair):
            raise ValueError(
                f"a batch {k:g} times as large would make the betas {betas}: the rule does not hold that far"
            )
    before = [float(group["lr"]) for group in optimizer.param_groups]
    for number, group in enumerate(optimizer.param_groups):
        for name in ("lr", "initial_lr"):
            if name in group:
                _scale(group, name, factor)
        if betas:
            group["betas"] = betas[number]
            if "eps" in group:
                _scale(group, "eps", 1 / factor)
    return {"before": before, "after": [float(group["lr"]) for group in optimizer.param_groups]}


def _scale(group: dict[str, Any], name: str, factor: float) -> None:
    """Scale a rate. A rate that is a tensor remains the same tensor, because a captured graph reads it there."""
    if isinstance(group[name], torch.Tensor):
        group[name].mul_(factor)
    else:
        group[name] *= factor


def _factor(from_batch: int, to_batch: int, rule: str) -> float:
    for name, size in (("from_batch", from_batch), ("to_batch", to_batch)):
        if size < 1:
            raise ValueError(f"{name}={size!r} is not a batch size: write 1 or more")
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not one of {', '.join(map(repr, RULES))}")
    k = to_batch / from_batch
    return k if rule == "linear" else math.sqrt(k)
