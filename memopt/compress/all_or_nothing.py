"""A change of a model that is measured, or is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.compress.report import Evaluate, Report, check_evaluate, measure, score

_CONTAINERS = (dict, set, list)
"""Of parameters, buffers, modules and hooks, which a change may write into: an RNN's assignments go to a list too."""


class Standing:
    """A model as it stands: its modules with all they have, its parameters with their flags and gradients. Nothing is
    copied but containers, so what a change replaces lives until this is dropped; values that a change overwrites are
    its own to bring back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (
                module,
                type(module),
                dict(module.__dict__),
                [(kept, kept.copy()) for kept in module.__dict__.values() if isinstance(kept, _CONTAINERS)],
            )
            for module in model.modules()
        ]
        self._parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]

    def restore(self) -> None:
        for module, kind, attributes, containers in self._modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for kept, content in containers:
                kept.clear()
                if isinstance(kept, list):
                    kept.extend(content)
                else:
                    kept.update(content)
        for parameter, requires_grad, gradient in self._parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


@dataclass
class Outcome:
    """What a change says of itself. undo: brings back values that it has overwritten."""

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)


def carry_out(
    model: nn.Module,
    technique: str,
    change: Callable[[Outcome], None],
    evaluate: Evaluate,
    make: Callable[..., Report] = Report,
    extra: Callable[[], Mapping[str, Any]] = dict,
) -> Report:
    """Changes the model, measured before and after; where anything raises, Ctrl-C too, it is as it was. `change` writes
    into its Outcome as it goes. make: the report's class, given what `extra` says at the end, beside the usual."""
    check_evaluate(evaluate)
    outcome = Outcome()
    before = measure(model, outcome.notes)
    accuracy = score(model, evaluate)
    standing = Standing(model)
    try:
        change(outcome)
        after = measure(model)
        return make(
            technique=technique,
            before=before,
            after=after,
            changed=tuple(outcome.changed),
            skipped=outcome.skipped,
            notes=tuple(outcome.notes),
            accuracy_before=accuracy,
            accuracy_after=score(model, evaluate),
            **extra(),
        )
    except BaseException:
        standing.restore()
        with torch.no_grad():
            for undo in reversed(outcome.undo):
                undo()
        raise
