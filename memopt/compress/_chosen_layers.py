"""Selection of the layers that a technique is applied to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

Layers: TypeAlias = str | nn.Module | Iterable[Any] | Callable[[str, nn.Module], bool] | None

Fits = Callable[[nn.Module], bool]


def choose(model: nn.Module, layers: Layers, fits: Fits, what: str) -> dict[str, nn.Module]:
    """The chosen layers by name, each module once, in the model's order.

    Those of the kind that `fits` says, of all or of those that `layers` names: names or modules of the model, each with
    all that is within; a function of name and module; None: all. `what` says the kind in errors.

    Raises:
        ValueError: A name or a module is not the model's, none of the kind is within one that was named, or nothing is
            left.
        TypeError: `layers` is anything else.
    """
    named = dict(model.named_modules())
    if layers is None:
        chosen = {name: module for name, module in named.items() if fits(module)}
    elif callable(layers) and not isinstance(layers, nn.Module):
        chosen = {name: module for name, module in named.items() if fits(module) and layers(name, module)}
    else:
        within: set[str] = set()
        for root in _roots(named, layers):
            found = {name for name, module in _within(named, root) if fits(module)}
            if not found:
                raise ValueError(f"layers: {shown(root)} is no {what}, and has none within")
            within |= found
        chosen = {name: module for name, module in named.items() if name in within}
    if not chosen:
        kinds = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        raise ValueError(
            f"the model has no {what}, but {kinds}"
            if layers is None
            else f"layers= leaves no {what}, of {kinds}"
        )
    return chosen


def _roots(named: dict[str, nn.Module], layers: Any) -> Iterator[str]:
    try:
        wanted = [layers] if isinstance(layers, str | nn.Module) else list(layers)
    except TypeError:
        raise TypeError(
            f"layers={layers!r}: expected names or modules, a function of name and module, or None"
        ) from None
    names = {id(module): name for name, module in named.items()}
    for one in wanted:
        if isinstance(one, nn.Module):
            if id(one) not in names:
                raise ValueError(f"layers: a {type(one).__name__} that was given is no module of the model")
            yield names[id(one)]
        elif isinstance(one, str):
            if one not in named:
                near = difflib.get_close_matches(one, named, n=3)
                raise ValueError(
                    f"layers: the model has no module {one!r}"
                    + (f": is it {', '.join(map(repr, near))}?" if near else "")
                )
            yield one
        else:
            raise TypeError(f"layers: {one!r} is neither a name nor a module")


def _within(named: dict[str, nn.Module], root: str) -> Iterator[tuple[str, nn.Module]]:
    inside = {id(module) for module in named[root].modules()}
    return ((name, module) for name, module in named.items() if id(module) in inside)


def shown(name: str) -> str:
    return repr(name) if name else "the model itself"
