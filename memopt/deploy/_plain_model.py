"""The plain model inside a live one: a copy of its modules without what memopt, DDP or torch.compile have put on them.

It shares the live model's tensors, so it takes no memory of their size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

from memopt._checkpoint.drop_in.checkpoint import _Checkpointed
from memopt._checkpoint.plan import Plan
from memopt._checkpoint.shape_plans import PlannedForward, StageForward
from memopt._checkpoint.stages.module_forwards import ClassForward
from memopt._offload.layers import LayerCall
from memopt._offload.visits import NAME
from memopt._runtime import arguments


@dataclass
class PlainModel:
    """The plain module, and how it differs from the live one.

    `taken_off`: what is not in the module that was on the live one. `moved`: whether the parameters of an offloaded
    model live elsewhere than it computes; the module is where they live, buffers included.
    """

    module: nn.Module
    taken_off: list[str]
    moved: bool


class _TakenOff:
    """A placeholder in a copy for one of memopt's objects; it is removed before the copy is returned."""

    def __init__(self, own: Any = None) -> None:
        self.own = own


def plain_model(model: nn.Module) -> PlainModel:
    """Copy the modules of a live model, which is not changed.

    Raises:
        TypeError: It is no module.
        ValueError: It cannot be copied; the message says why.
    """
    arguments.check_module(model, "deploy.export: model")
    inside, taken_off = model, []
    while (held := _wrapped(inside)) is not None:
        taken_off.append(type(inside).__name__)
        inside = held
    _check(inside)
    module = _copy(inside, taken_off)
    moved = any(isinstance(m.__dict__.get(NAME), LayerCall) for m in inside.modules())
    if moved:
        _bring_buffers_home(module)
    _make_masks_permanent(module, taken_off)
    return PlainModel(module, list(dict.fromkeys(taken_off)), moved)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that DDP, DataParallel or torch.compile wraps."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return module.module  # type: ignore[no-any-return]
    held = getattr(module, "_orig_mod", None)
    return held if isinstance(held, nn.Module) else None


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"deploy.export: {where} is already TorchScript: export the module from which it was made"
            )
        if kinds.intersection(("FSDPModule", "FullyShardedDataParallel")):
            raise ValueError(
                f"deploy.export: {where} is sharded, so each rank has a part of it: load its full state_dict "
                "(torch.distributed.checkpoint.state_dict) into a plain model, and export that"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter):
            raise ValueError(f"deploy.export: {name!r} has no shape yet: run the lazy module once first")
        if type(tensor.data).__name__ == "DTensor":
            raise ValueError(
                f"deploy.export: {name!r} is a DTensor, a part of it on each rank: gather it first"
            )
        if tensor.is_meta:
            raise ValueError(
                f"deploy.export: {name!r} is on the meta device and has no values: load them first"
            )


def _copy(model: nn.Module, taken_off: list[str]) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        memo[id(tensor)] = tensor
    inner: list[nn.Module] = []
    for module in model.modules():
        if _wrapped(module) is not None:
            inner.append(module)
        if module._compiled_call_impl is not None:
            taken_off.append("compile()")  # nn.Module's state leaves it out of a copy
        for value in module.__dict__.values():
            if isinstance(value, (StageForward, PlannedForward)):
                memo[id(value)] = _TakenOff(None if isinstance(value.own, ClassForward) else value.own)
                taken_off.append("auto_checkpoint")
            elif isinstance(value, LayerCall):
                memo[id(value)] = _TakenOff()
                taken_off.append("offload_layers")
            elif isinstance(value, Plan):
                memo[id(value)] = _TakenOff()
            elif isinstance(value, _Checkpointed):
                memo[id(value)] = _TakenOff(value.function)
                taken_off.append("checkpoint")
    try:
        for module in reversed(inner):  # those within others first
            memo[id(module)] = copy.deepcopy(_wrapped(module), memo)
            taken_off.append(type(module).__name__)
        made: nn.Module = copy.deepcopy(model, memo)
        for original in list(model.modules()):
            if isinstance(there := memo.get(id(original)), nn.Module):
                _mend(there, memo, taken_off)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"deploy.export: a {type(model).__name__} cannot be copied ({type(error).__name__}: {error}): remove the "
            "part that copy.deepcopy() refuses, such as a hook or a handle"
        ) from error
    return made


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all tensors of the modules: parameters, buffers, and attributes that are tensors or containers of them."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        for leaf in pytree.tree_leaves(list(module.__dict__.values())):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _mend(module: nn.Module, memo: dict[int, Any], taken_off: list[str]) -> None:
    """Replace placeholders in a module of the copy by the module's own attributes."""
    for name, value in list(module.__dict__.items()):
        if not isinstance(value, _TakenOff):
            continue
        del module.__dict__[name]
        own = value.own
        if own is None or (
            inspect.ismethod(own) and own.__func__ is inspect.getattr_static(type(module), name, None)
        ):
            continue
        setattr(module, name, copy.deepcopy(own, memo))  # a module becomes one of the module's
    declared = inspect.getattr_static(type(module), "forward", None)
    if isinstance(declared, _Checkpointed) and "forward" not in module.__dict__:
        module.__dict__["forward"] = declared.function.__get__(module)
        taken_off.append("checkpoint")


def _bring_buffers_home(module: nn.Module) -> None:
    """Move an offloaded model's buffers, in the copy, from the compute device to the device of its parameters."""
    home = next(module.parameters()).device
    tied: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != home:
                part._buffers[name] = tied.setdefault(id(buffer), buffer.to(home))


def _make_masks_permanent(module: nn.Module, taken_off: list[str]) -> None:
    """Merge the masks of torch.nn.utils.prune, which keeps a weight, its mask, and their product: the copy has only the
    product."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for hook in list(part._forward_pre_hooks.values()):
            if not isinstance(hook, prune.BasePruningMethod):
                continue
            name = hook._tensor_name
            original = part._parameters[f"{name}_orig"]
            assert original is not None
            # remove() writes into it, and it is the live model's.
            if id(original) not in made:
                made[id(original)] = nn.Parameter(original.detach().clone(), original.requires_grad)
            part._parameters[f"{name}_orig"] = made[id(original)]
            prune.remove(part, name)
            taken_off.append("pruning masks")
