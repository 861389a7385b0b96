"""The models that are compared: given as modules, or as functions that make them, so that one is there at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt._estimate.training import function_named
from memopt.deploy._plain_model import plain_model


@dataclass
class Candidate:
    """A model to compare.

    `given`: a module, or a function without arguments that returns one, or (module, sample). `sample`: the common
    sample, for functions that return none."""

    name: str
    given: nn.Module | Callable[[], Any]
    sample: Any

    def whole(self) -> tuple[nn.Module, Any]:
        """Return a model of its own with values, and its sample."""
        if isinstance(self.given, nn.Module):
            return copy.deepcopy(self.given), self.sample
        return self._made(self.given)

    def shapes(self) -> tuple[nn.Module, Any]:
        """Return a model whose tensors are on the meta device: they have shapes and take no memory."""
        if not isinstance(self.given, nn.Module):
            try:
                with torch.device("meta"):
                    model, sample = self._made(self.given)
                if all(t.is_meta for t in (*model.parameters(), *model.buffers())):
                    return model, sample
            except (RuntimeError, NotImplementedError, ValueError):
                pass  # it reads values while it is made: then it gets some
        model, sample = (
            (self.given, self.sample) if isinstance(self.given, nn.Module) else self._made(self.given)
        )
        return _on_meta(plain_model(model).module), sample

    def for_estimate(self, shapes: nn.Module) -> nn.Module:
        """Arguments for memopt.estimate(): shapes, unless the model holds whole numbers or truths, which may decide of
        shapes."""
        if isinstance(self.given, nn.Module):
            return self.given
        if any(not b.is_floating_point() and b.numel() > 1 for b in shapes.buffers()):
            return self.whole()[0]
        return shapes

    def _made(self, make: Callable[[], Any]) -> tuple[nn.Module, Any]:
        with same_random_states():
            made = make()
        model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, self.sample)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the function returned {type(model).__name__}: it must return a module, or (module, sample)"
            )
        if sample is None:
            raise TypeError(
                "a model needs a sample to run on: pass sample=, or return (module, sample) from the function"
            )
        return model, sample


def candidates(models: Mapping[str, Any] | Iterable[Any], sample: Any) -> list[Candidate]:
    """Return the candidates by name. Raises TypeError or ValueError for what is not a model. No model is made yet."""
    if isinstance(models, nn.Module | str) or callable(models):
        raise TypeError("compare_models: give several models, as a list or as a dict by name")
    named = list(models.items()) if isinstance(models, Mapping) else _named(models)
    if not named:
        raise ValueError("compare_models: there is nothing to compare: give models, a dict by name or a list")
    return [Candidate(str(name), _function(name, given), sample) for name, given in named]


def _function(name: object, given: Any) -> nn.Module | Callable[[], Any]:
    if isinstance(given, str):
        module, _, attribute = given.partition(":")
        if not module or not attribute:
            raise ValueError(
                f'compare_models: {given!r} is not the name of a function: write "module:function"'
            )
        return lambda: function_named(given)()
    if not callable(given):
        raise TypeError(
            f"compare_models: {name!r} is a {type(given).__name__}, not a module or a function that makes one"
        )
    return given  # type: ignore[no-any-return]


def _named(models: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the models by class or function name; a name that is already used gets a number."""
    found: dict[str, Any] = {}
    for given in models:
        if isinstance(given, str):
            name = given
        elif isinstance(given, nn.Module):
            name = type(given).__name__
        else:
            name = getattr(given, "__name__", type(given).__name__)
        number = 2
        unique = name
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = given
    return list(found.items())


def same_random_states() -> AbstractContextManager[None]:
    """Return a context that restores the program's random states afterwards."""
    index = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(index)  # type: ignore[no-any-return]


def _on_meta(module: nn.Module) -> nn.Module:
    """Return the module with shapes in the place of the tensors that it shares with the original; ties are kept."""
    made: dict[int, torch.Tensor] = {}

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            there = tensor.detach().to("meta")
            parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if parameter else there
        return made[id(tensor)]

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                setattr(part, name, shape(parameter))  # an RNN holds it in a list too
        for table in (part._buffers, part.__dict__):
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    table[name] = shape(tensor)
    return module
