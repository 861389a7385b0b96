"""The change of a model: what may be changed, which layers are chosen, and all of it done and measured, or undone."""

from __future__ import annotations

import difflib
import importlib
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize, prune

from memopt._runtime import arguments
from memopt._runtime.state_snapshot import CONTAINERS, GradientTensors, refill
from memopt.compress._saved_report import Evaluate, Report, check_evaluate, measure, score

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_model(model: Any, function: str, *, replaces: bool) -> None:
    """Refuse what is no module, and one that holds its parameters in a way that a change would break.

    replaces: whether parameters become other objects, or of another shape. Raises TypeError and ValueError.
    """
    arguments.check_module(model, f"{function}: model")
    for name, module in model.named_modules():
        if why := _refusal(module, replaces):
            raise ValueError(f"{function}: {_where(name, module)} {why}")


def _where(name: str, module: nn.Module) -> str:
    return f"{shown(name)} ({type(module).__name__})"


def _refusal(module: nn.Module, replaces: bool) -> str | None:
    # Only what is loaded can be in the way: these modules of memopt import what they need, and are asked by name.
    forward, call = module.__dict__.get("forward"), module.__dict__.get("_call_impl")
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, whose code holds its parameters: compress the module from which it was made"
    if "FullyShardedDataParallel" in kinds or "FSDPModule" in kinds:
        return "holds shards of its parameters: compress the model before it is sharded"
    if not replaces:
        return None
    if kinds.intersection(_WRAPPERS):
        return "manages its parameters itself: compress the inner model before it is wrapped"
    if module._compiled_call_impl is not None or "OptimizedModule" in kinds:
        return (
            "is compiled, and compiled code holds its parameters: compress the plain model, then compile it"
        )
    if type(call).__name__ == "LayerCall" or type(call).__name__ == "ModelCall":
        return "is offloaded by memopt.offload_layers(): .remove() its handle first, and offload it again afterwards"
    if type(forward).__name__ in ("StageForward", "PlannedForward"):
        return (
            "runs by a plan of memopt.auto_checkpoint(), which measured its tensors: call "
            "memopt.undo_checkpoint(model) first, and plan again afterwards"
        )
    return None


def weight_of(name: str, module: nn.Module, parameter: str, function: str) -> nn.Parameter:
    """A module's own parameter with values in plain memory.

    Raises:
        ValueError: It is masked by torch.nn.utils.prune, made of others, quantised, sparse, sharded or without values.
    """
    found = module._parameters.get(parameter)
    whose = f"{function}: {parameter} of {_where(name, module)}"
    if found is None:
        if any(isinstance(hook, prune.BasePruningMethod) for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"{whose} is already pruned by a mask that is applied at every call: make it permanent first "
                f"(torch.nn.utils.prune.remove(module, {parameter!r}))"
            )
        if parametrize.is_parametrized(module, parameter):
            raise ValueError(
                f"{whose} is parametrized, computed from other tensors at every use: call "
                "torch.nn.utils.parametrize.remove_parametrizations() first"
            )
        if hasattr(module, parameter) and not callable(getattr(module, parameter)):
            raise ValueError(
                f"{whose} is not a parameter, but computed from other tensors before every call: remove the hook that "
                "computes it first (torch.nn.utils.remove_weight_norm() or remove_spectral_norm())"
            )
        raise ValueError(f"{whose} is already quantised or packed: it is not a parameter with values")
    if why := unusable(found):
        raise ValueError(f"{whose} {why}")
    return found


def unusable(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor's values cannot be changed, None if they can."""
    if isinstance(tensor, UninitializedParameter):
        return "has no shape yet: run the lazy module once first"
    if type(tensor) not in _PLAIN or type(tensor.data) is not torch.Tensor:
        kind = type(tensor if type(tensor) not in _PLAIN else tensor.data)
        if kind.__name__ == "DTensor":
            return "is a DTensor, a shard of a whole: compress the model before it is sharded"
        return (
            f"is a {kind.__name__}, already quantised, sparse or wrapped: only plain tensors are compressed"
        )
    if tensor.layout is not torch.strided:
        return f"is sparse already ({tensor.layout})"
    if tensor.is_quantized:
        return "is quantised already"
    if tensor.is_meta:
        return "is on the meta device and has no values: give it values first (to_empty(), load_state_dict())"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode and cannot be changed outside of it: clone() it first"
    if not tensor.is_floating_point():
        return f"is {tensor.dtype}: only floating-point weights are compressed"
    return None


# ---- the layers that a technique is applied to -----------------------------------------------------------------------


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
                raise ValueError(f"layers: {shown(root)} is not a {what} and contains none")
            within |= found
        chosen = {name: module for name, module in named.items() if name in within}
    if not chosen:
        kinds = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        raise ValueError(
            f"the model has no {what}, only {kinds}"
            if layers is None
            else f"layers= selects no {what}, only {kinds}"
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
                raise ValueError(
                    f"layers: a {type(one).__name__} that was given is not a module of the model"
                )
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


# ---- all or nothing --------------------------------------------------------------------------------------------------


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


# ---- arguments and libraries -----------------------------------------------------------------------------------------


def fraction(amount: Any, what: str = "amount") -> float:
    """Check a share, a float within 0…1.

    Integers are refused: torch.nn.utils.prune takes them for a number of elements, so that 1 could mean all or one.
    """
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(
            f"{what}={amount!r} is a {type(amount).__name__}: expected a share, a float between 0 and 1"
        )
    if isinstance(amount, numbers.Integral):
        raise TypeError(
            f"{what}={amount!r} is an integer: expected a share, a float between 0 and 1{_proposed(amount, what)}"
        )
    value: Any = amount  # not a float yet: a Fraction may be too large for one
    if not 0 <= value <= 1:  # NaN is neither
        raise ValueError(
            f"{what}={amount!r}: expected a share, a float between 0 and 1{_proposed(amount, what)}"
        )
    return float(value)


def _proposed(amount: Any, what: str) -> str:
    """Suggest the share that was probably meant: a number from 2 to 100 is a percentage. Empty if there is none."""
    if 2 <= amount <= 100:
        return f" ({what}={float(amount) / 100:g})"
    return f" ({what}={float(amount)})" if 0 <= amount <= 1 else ""


def library(module: str, package: str, function: str) -> Any:
    """Import a module. What it prints or raises during the import is its own. ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and cannot find something itself
        raise ImportError(
            f"{function} needs {package}, which is not installed: pip install 'memopt[compress]', or {package}",
            name=error.name,
        ) from error
