"""A change of a model that is measured, or is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt._runtime.state_snapshot import CONTAINERS, GradientTensors, refill
from memopt.compress._saved_report import Evaluate, Report, check_evaluate, measure, score


class ModelStructure:
    """A snapshot of a model's modules with all they have, and of its parameters with their flags and gradients.

    Only containers are copied: those of parameters, buffers, modules and hooks, and lists such as an RNN's of its
    weights. So what a change replaces lives until this is dropped, and a change brings back itself the values that it
    overwrites.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (
                module,
                type(module),
                dict(module.__dict__),
                [(kept, kept.copy()) for kept in module.__dict__.values() if isinstance(kept, CONTAINERS)],
            )
            for module in model.modules()
        ]
        self._gradients = GradientTensors(model.parameters())

    def restore(self) -> None:
        for module, kind, attributes, containers in self._modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for kept, content in containers:
                refill(kept, content)
        self._gradients.restore()


@dataclass
class Outcome:
    """Result of a change. undo: restores the values that it has overwritten."""

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
    """Change the model, measured before and after; where anything raises, Ctrl-C too, it is as it was.

    `change` writes into its Outcome as it goes. make: the report's class, given what `extra` says at the end, beside
    the usual.
    """
    check_evaluate(evaluate)
    outcome = Outcome()
    before = measure(model, outcome.notes)
    accuracy = score(model, evaluate)
    structure = ModelStructure(model)
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
        structure.restore()
        with torch.no_grad():
            for undo in reversed(outcome.undo):
                undo()
        raise
