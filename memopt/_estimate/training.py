"""A model's training steps, as an estimate runs them: forward, backward, optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

AMP = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


@dataclass
class TrainingTask:
    """The training that an estimate runs.

    `subject`: a module; a function of the sample that returns a loss; without a sample, a function that returns
    (module, sample), (module, sample, optimizer) or a loss, or that trains by itself; or "module:function".

    `optimizer`: an optimizer, or a callable that makes one from parameters (torch.optim.AdamW). `loss`: of the module's
    output; by default its .loss or ["loss"], else the sum of all outputs with a gradient. `train`: False for the
    forward alone.
    """

    subject: Any
    sample: Any = None
    optimizer: Any = None
    loss: Callable[[Any], Any] | None = None
    amp: str | None = None
    steps: int = 3
    train: bool = True

    def run(self, device: str) -> None:
        """Run the training on a device, "cpu" for fake tensors; tensors that are made elsewhere are moved there."""
        subject = function_named(self.subject) if isinstance(self.subject, str) else self.subject
        sample, optimizer = self.sample, self.optimizer
        if sample is None and not isinstance(subject, torch.nn.Module):
            made = subject()
            if made is None:
                return  # it has trained by itself
            subject, sample, optimizer = _parts(made, optimizer)
            if subject is None:
                subject, sample = self.subject if callable(self.subject) else function_named(self.subject), ()
        if sample is None:
            raise TypeError("a module needs a sample: pass sample=, its forward's arguments")
        if isinstance(subject, torch.nn.Module):
            held = [*subject.parameters(), *subject.buffers()]
            if any(tensor.device.type != device for tensor in held):
                subject.to(device)
            subject.train(self.train)
        arguments, named = as_arguments(to_device(sample, device))
        self._steps(subject, arguments, named, optimizer, device)

    def _steps(
        self, subject: Any, arguments: tuple[Any, ...], named: dict[str, Any], optimizer: Any, device: str
    ) -> None:
        for _ in range(self.steps):
            with torch.set_grad_enabled(self.train), self._autocast(device):
                out = subject(*arguments, **named)
                total = loss_of(out, self.loss) if self.train else None
            del out
            if total is None:
                continue
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                optimizer = optimizer(_parameters(subject, total))
            total.backward()
            del total
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elif isinstance(subject, torch.nn.Module):
                subject.zero_grad(set_to_none=True)

    def _autocast(self, device: str) -> Any:
        return nullcontext() if self.amp is None else torch.autocast(device, dtype=AMP[self.amp])


def function_named(name: str) -> Callable[..., Any]:
    """Import the function of a name, "module:function"."""
    module, _, function = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


def _parts(made: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Split a function's result into (model, sample, optimizer); model is None where the result is a loss."""
    if isinstance(made, torch.nn.Module):
        raise TypeError("the function returned a model and no sample: it must return (model, sample)")
    if isinstance(made, tuple) and made and isinstance(made[0], torch.nn.Module) and len(made) in (2, 3):
        return made[0], made[1], made[2] if len(made) == 3 else optimizer
    if isinstance(made, torch.Tensor) or hasattr(made, "loss"):
        return None, None, optimizer
    raise TypeError(
        f"the function returned {type(made).__name__}: it must return (model, sample), (model, sample, optimizer), a "
        "loss, or nothing if it trains by itself"
    )


def as_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return forward's arguments: a tuple's or list's items in order, a dict's by name, anything else as it is."""
    if isinstance(sample, dict):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})


def to_device(sample: Any, device: str) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, sample)


def loss_of(out: Any, loss: Callable[[Any], Any] | None) -> torch.Tensor:
    if loss is not None:
        made = loss(out)
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"loss= returned {type(made).__name__}, not a tensor")
        return made if made.dim() == 0 else made.sum()
    for found in (getattr(out, "loss", None), out.get("loss") if isinstance(out, dict) else None):
        if isinstance(found, torch.Tensor):
            return found
    from torch.utils import _pytree as pytree

    ends = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not ends:
        raise TypeError(
            "no output of the forward pass requires a gradient: pass train=False to run the forward pass "
            "alone"
        )
    total = ends[0].sum() if ends[0].dim() else ends[0]
    for end in ends[1:]:
        total = total + end.sum()
    return total


def _parameters(subject: Any, total: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(subject, torch.nn.Module):
        return list(subject.parameters())
    return list(_leaves(total))


def _leaves(total: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a backward pass from here leaves gradients in."""
    seen, waiting = set(), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        waiting += [before for before, _ in node.next_functions]
