"""memopt.compare_models: which architecture takes how much, and how long."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memopt import _C
from memopt._compare import step_costs
from memopt._compare.candidates import Candidate, candidates
from memopt._compare.model_table import ESTIMATED, KEYS, MEASURED, ModelComparison, ModelFigures
from memopt._estimate.model import batch_of
from memopt._estimate.model import estimate as estimate_one
from memopt._estimate.training import AMP
from memopt._runtime.host_memory import available
from memopt._runtime.log import logger
from memopt._runtime.storages import module_bytes
from memopt._runtime.torch_version import require


def compare_models(
    models: Mapping[str, Any] | Iterable[Any],
    sample: Any = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], Any] | None = None,
    amp: str | None = None,
    train: bool = True,
    sort: str = "peak",
    time: str | None = MEASURED,
    rounds: int = 3,
    scores: Mapping[str, float] | None = None,
    method: str | None = None,
    python: str | None = None,
    unprotected: bool = False,
) -> ModelComparison:
    """Compare the costs of architectures: parameters, bytes, peak memory, FLOPs and seconds.

    An error of one model is reported in its row and does not affect the others. Models given as modules are not
    changed.

    Args:
        models: Models by name, or a list of them: modules, functions without arguments that make one (or one and its
            sample), or such functions' names, "module:function". Functions are called one at a time, so only one model
            exists at once. Except for its times, it is made on the meta device, where it takes no memory.
        sample: Input of a forward, as in memopt.estimate(). Times are taken on its device.
        optimizer: A function from parameters to an optimizer, such as torch.optim.AdamW. Without one a step is a
            forward and a backward pass.
        loss: A function from the output to a scalar; by default the output's .loss, or the sum of its tensors.
        amp: "bf16" or "fp16" for autocast.
        train: False for the forward alone.
        sort: "peak", "time", "flops", "parameters", "bytes", "score" (the largest first) or "name".
        time: "measured" on this machine, in rounds over all models; "estimated" from the speed of a matrix product and
            of a copy here (the roofline, a lower bound); None for no times.
        rounds: Number of rounds for measured times.
        scores: A figure for each model, such as an accuracy; larger is better.
        method: As in memopt.estimate().
        python: As in memopt.estimate().
        unprotected: As in memopt.estimate().

    Returns:
        A ModelComparison with a row for each model: the number of parameters, bytes of parameters and buffers (each
        storage once), the peak of training on a card as memopt.estimate() gives it, FLOPs of a step by torch's counter,
        and seconds. Print it; .plot() draws it, .pareto() names those on the Pareto front, .fits(card) those that can
        be trained on that card.

    Raises:
        TypeError: A model or an argument has the wrong type; no model was made.
        ValueError: An argument has an invalid value; no model was made.

    Examples:
        >>> makers = {"ResNet": make_resnet, "ViT": make_vit}
        >>> print(memopt.compare_models(makers, images, optimizer=torch.optim.AdamW))
    """
    require("memopt.compare_models()")
    if sort not in KEYS:
        raise ValueError(f"compare_models: sort={sort!r} is not one of {', '.join(map(repr, KEYS))}")
    if time not in (MEASURED, ESTIMATED, None):
        raise ValueError(f'compare_models: time={time!r} is neither "{MEASURED}", "{ESTIMATED}" nor None')
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"compare_models: rounds={rounds!r} is not a number of rounds: write 1 or more")
    if amp is not None and amp not in AMP:
        raise ValueError(f"compare_models: amp={amp!r} is not one of {', '.join(map(repr, AMP))}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "compare_models: optimizer= must create an optimizer from each model's parameters: pass torch.optim.AdamW"
        )
    given = candidates(models, sample)
    if any(isinstance(one.given, nn.Module) for one in given) and sample is None:
        raise TypeError(
            "compare_models: a module needs a sample to run on: pass sample=, its forward's arguments"
        )
    unknown = set(scores or ()) - {one.name for one in given}
    if unknown:
        raise ValueError(
            f"compare_models: scores= names {', '.join(sorted(unknown))}, which is not among the models"
        )
    step = step_costs.Step(_device(sample), optimizer, loss, amp, train)
    rows = {one.name: ModelFigures(one.name, score=(scores or {}).get(one.name)) for one in given}
    how = {"method": method, "python": python, "unprotected": unprotected}
    counts: dict[str, step_costs.Counts] = {}
    shapes = {}
    for one in given:
        logger.info("compare_models: %s, its costs", one.name)
        made = _shapes(one, rows[one.name])
        if made is not None:
            shapes[one.name] = made
            _estimate(one, made, rows[one.name], step, how)
    # After all estimates: fake tensors go through a fork, and a backward pass may start threads that forbid it.
    for one in given:
        if one.name in shapes:
            counted = _count(one, shapes.pop(one.name), rows[one.name], step)
            if counted is not None:
                counts[one.name] = counted
    if time == MEASURED:
        _measure(given, rows, step, rounds)
    elif time == ESTIMATED:
        flops, moved = step_costs.rates(step.device)
        for name, counted in counts.items():
            rows[name].seconds = counted.seconds(flops, moved)
    return ModelComparison(
        rows=rows,
        sort=sort,
        time=time,
        machine=None if time is None else step_costs.machine(step.device),
        batch=batch_of(sample),
        optimizer=None if optimizer is None else getattr(optimizer, "__name__", type(optimizer).__name__),
        amp=amp,
        train=train,
    )


def _device(sample: Any) -> torch.device:
    leaves = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    return leaves[0].device if leaves and not leaves[0].is_meta else torch.device("cpu")


Made = tuple[nn.Module, Any]  # on meta, and its sample


def _shapes(candidate: Candidate, row: ModelFigures) -> Made | None:
    try:
        model, sample = candidate.shapes()
    except Exception as error:  # whatever a function of the user's raises
        row.fails("the model", error)
        return None
    row.parameters = sum(p.numel() for p in model.parameters())
    row.bytes = sum(module_bytes(model))
    return model, sample


def _estimate(
    candidate: Candidate,
    made: Made,
    row: ModelFigures,
    step: step_costs.Step,
    how: dict[str, Any],
) -> None:
    model, sample = made
    try:
        found = estimate_one(
            candidate.for_estimate(model),
            sample,
            optimizer=step.optimizer,
            loss=step.loss,
            amp=step.amp,
            train=step.train,
            quick=True,
            **how,
        )
    except Exception as error:
        row.fails("the peak", error)
    else:  # not all of it: it can run the model again, and holds it for that
        row.peak_bytes, row.needed_bytes, row.method = found.peak_bytes, found.needed_bytes, found.method


def _count(
    candidate: Candidate, made: Made, row: ModelFigures, step: step_costs.Step
) -> step_costs.Counts | None:
    model, sample = made
    try:
        try:
            found = step_costs.count(model, sample, step.loss, step.train)
        except (RuntimeError, NotImplementedError):  # it reads values: then it is run for once
            whole, sample = candidate.whole()
            own = copy.deepcopy(sample)
            found = step_costs.count(whole.to(step.device), own, step.loss, step.train, str(step.device))
    except Exception as error:
        row.fails("FLOPs", error)
        return None
    row.flops_forward, row.flops = found.forward, found.step
    return found


def _measure(
    given: list[Candidate],
    rows: dict[str, ModelFigures],
    step: step_costs.Step,
    rounds: int,
) -> None:
    room = available(swap=False) if step.device.type == "cpu" else torch.cuda.mem_get_info(step.device)[0]
    fit = []
    for one in given:
        row = rows[one.name]
        if "the model" in row.errors:
            continue
        if row.peak_bytes is not None and room is not None and row.peak_bytes[0] > room:
            row.errors["time"] = (
                f"not run: it takes {_C.format_size(row.peak_bytes[0])}, but only {_C.format_size(room)} are free"
            )
        else:
            fit.append(one)
    for name, times in step_costs.measure(fit, step, rounds).items():
        rows[name].seconds, rows[name].spread = times.median, times.spread
        if times.error is not None:
            rows[name].errors["time"] = times.error
