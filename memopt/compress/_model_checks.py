"""Models and weights that cannot be compressed, why, and what to do first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize, prune

from memopt.compress._chosen_layers import shown

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_model(model: Any, function: str, *, replaces: bool) -> None:
    """Refuse what is no module, and one that holds its parameters in a way that a change would break.

    replaces: whether parameters become other objects, or of another shape. Raises TypeError and ValueError.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a torch.nn.Module, got a {type(model).__name__}")
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
        return "is TorchScript, whose code holds its parameters: compress the module it was made from"
    if "FullyShardedDataParallel" in kinds or "FSDPModule" in kinds:
        return "holds shards of its parameters: compress the model before it is sharded"
    if not replaces:
        return None
    if kinds.intersection(_WRAPPERS):
        return "keeps its parameters itself: compress the model within, before it is wrapped"
    if module._compiled_call_impl is not None or "OptimizedModule" in kinds:
        return (
            "is compiled, and compiled code holds its parameters: compress the plain model, then compile it"
        )
    if type(call).__name__ == "LayerCall" or type(call).__name__ == "ModelCall":
        return "is offloaded by memopt.offload_layers(): .remove() its handle first, and offload it again afterwards"
    if type(forward).__name__ == "StageForward":
        return (
            "runs by a plan of memopt.auto_checkpoint(), which measured its tensors: memopt.undo_checkpoint(model) "
            "first, and plan again afterwards"
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
                f"{whose} is pruned already, by a mask that is applied at every call: make it permanent first "
                f"(torch.nn.utils.prune.remove(module, {parameter!r}))"
            )
        if parametrize.is_parametrized(module, parameter):
            raise ValueError(
                f"{whose} is parametrized, made of other tensors at every use: "
                "torch.nn.utils.parametrize.remove_parametrizations() first"
            )
        if hasattr(module, parameter) and not callable(getattr(module, parameter)):
            raise ValueError(
                f"{whose} is no parameter, but made of other tensors before every call: remove what makes it first "
                "(torch.nn.utils.remove_weight_norm() or remove_spectral_norm())"
            )
        raise ValueError(f"{whose} is quantised already, or packed: it is no parameter with values")
    if why := unusable(found):
        raise ValueError(f"{whose} {why}")
    return found


def unusable(tensor: torch.Tensor) -> str | None:
    """The reason why a tensor's values cannot be changed, None if they can."""
    if isinstance(tensor, UninitializedParameter):
        return "has no shape yet: run the lazy module once first"
    if type(tensor) not in _PLAIN or type(tensor.data) is not torch.Tensor:
        kind = type(tensor if type(tensor) not in _PLAIN else tensor.data)
        if kind.__name__ == "DTensor":
            return "is a DTensor, a shard of a whole: compress the model before it is sharded"
        return f"is a {kind.__name__}, so quantised, sparse or wrapped already: only plain tensors are compressed"
    if tensor.layout is not torch.strided:
        return f"is sparse already ({tensor.layout})"
    if tensor.is_quantized:
        return "is quantised already"
    if tensor.is_meta:
        return "is on the meta device, without values: give it values first (to_empty(), load_state_dict())"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode and cannot be changed outside of it: clone() it first"
    if not tensor.is_floating_point():
        return f"is {tensor.dtype}: only floating-point weights are compressed"
    return None
