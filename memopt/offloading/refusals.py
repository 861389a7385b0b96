"""Models whose parameters cannot be offloaded, and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check(model: nn.Module) -> None:
    """Raises TypeError or ValueError, naming what it is and what to do, where the model is one of those."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload_layers: model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        if why := _refusal(module):
            raise ValueError(f"offload_layers: {_where(name, module)} {why}")
    for name, parameter in model.named_parameters():
        if why := _parameter_refusal(parameter):
            raise ValueError(f"offload_layers: parameter {name!r} {why}")
    _check_memory(model)


def _where(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _refusal(module: nn.Module) -> str | None:
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if kinds.intersection(WRAPPERS) or "FSDPModule" in kinds:
        return (
            "keeps its parameters itself: FSDP2 offloads by its own CPUOffloadPolicy; offload the module inside DDP "
            "before it is wrapped on one device only"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, whose code holds its parameters: offload the module it was made from"
    if module._compiled_call_impl is not None or "OptimizedModule" in kinds:
        return "is compiled, and compiled code holds its parameters: offload the plain module, without torch.compile"
    if parametrize.is_parametrized(module):
        return (
            "has parametrizations, which make its parameters out of others at every use: "
            "torch.nn.utils.parametrize.remove_parametrizations() first"
        )
    return None


def _parameter_refusal(p: nn.Parameter) -> str | None:
    if isinstance(p, UninitializedParameter):
        return "has no shape yet: run the lazy module once first"
    if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
        kind = type(p if type(p) is not nn.Parameter else p.data).__name__
        return f"is a {kind}: only plain tensors can be moved byte by byte"
    if p.layout is not torch.strided:
        return f"is sparse ({p.layout}): only dense ones can visit a device"
    if p.is_quantized:
        return "is quantized: only plain tensors can be moved byte by byte"
    if p.device.type not in ("cpu", "cuda"):
        return f"is on {p.device.type}: only CUDA devices and the CPU are known" + (
            "; give it values first (to_empty(), load_state_dict())" if p.is_meta else ""
        )
    return None


def _check_memory(model: nn.Module) -> None:
    """Two parameters in the same memory would be two afterwards."""
    begin_end = sorted(_spans(model))
    for (_, end, first), (begin, _, second) in pairwise(begin_end):
        if begin < end:
            raise ValueError(
                f"offload_layers: parameters {first!r} and {second!r} are in the same memory without being the same "
                "nn.Parameter: tie them by assigning the one to the other module"
            )


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    for name, p in model.named_parameters():
        if p.numel():
            extent = 1 + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            yield p.data_ptr(), p.data_ptr() + extent * p.element_size(), name


def devices_of(model: nn.Module) -> list[torch.device]:
    return list(dict.fromkeys(p.device for p in model.parameters()))
