"""memopt.compress.quantize_(): linear layers' weights in fewer bits, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt.compress._model_changes import (
    Layers,
    Outcome,
    carry_out,
    check_model,
    choose,
    library,
    shown,
    weight_of,
)
from memopt.compress._saved_report import Evaluate, Report

METHODS = ("int8_dynamic", "int8_weight_only", "int4")
GROUP_SIZES = (32, 64, 128)
"""Of int4: those that torchao takes on every device."""

_TRIED_ROWS = 64
"""A multiple of what every kernel wants of a layer's outputs."""

_NO_GRADIENTS = {
    "int8_dynamic": "no gradient passes through these layers: they are for inference only",
    "int4": "no gradient passes through these layers: they are for inference only",
}


def quantize_(
    model: nn.Module,
    method: Any = "int8_weight_only",
    *,
    layers: Layers = None,
    group_size: int | None = None,
    evaluate: Evaluate = None,
) -> Report:
    """Quantise the weights of a model's linear layers in place, with torchao.

    The quantised weights are new parameters that take no gradient. state_dict(), pickle and copies work with them where
    torchao is imported, and load_state_dict() with assign=True loads them into a plain model. Until the end of the call
    the old weights are kept beside them. Before anything changes, some rows of the first layer of each type and device
    are tried on a copy.

    Args:
        model: The model.
        method: "int8_weight_only": 8-bit weights with a scale for each row, dequantised where they are used; any
            device. "int8_dynamic": 8-bit weights, and inputs quantised when they arrive, with a scale for each row;
            products are of integers; any device. "int4": 4-bit weights with a scale and a zero point for each
            `group_size` elements of a row: on CUDA devices of compute capability 8.0 and later, in bfloat16, and on the
            CPU, where a layer's number of outputs must be a multiple of 16. Or a config of torchao.quantization, which
            is passed on unchanged; the methods above are Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig,
            Int4WeightOnlyConfig (CUDA) and PrototypeInt4WeightOnlyConfig (CPU), without their set_inductor_config,
            which changes settings of the whole process.
        layers: Names or modules of the model, with all their submodules, or a function of name and module; by default
            all linear layers except those within attention modules that read their weights themselves.
        group_size: 32, 64 or 128 (the default) elements, for "int4".
        evaluate: A function of the model that returns its accuracy; it is called before and after, in eval mode and
            without gradients.

    Returns:
        A Report.

    Raises:
        ImportError: torchao is missing. The model is unchanged then, as with all of these.
        NotImplementedError: The device has no kernels for the method.
        TypeError: An argument has the wrong type.
        ValueError: The method or a layer is unknown, no layer is suitable, or a weight is already quantised, masked,
            sparse, sharded or on the meta device; the message names the layer and the remedy.

    Examples:
        >>> print(memopt.compress.quantize_(model, "int4", group_size=64))
    """
    function = f"quantize_ {method}" if isinstance(method, str) else f"quantize_ {type(method).__name__}"
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(
            f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}, or a config of torchao"
        )
    size = _group_size(method, group_size)
    check_model(model, function, replaces=True)
    chosen = choose(model, layers, _is_linear, "linear layer that can be quantised")
    weights = {name: weight_of(name, module, "weight", function) for name, module in chosen.items()}
    devices = {weight.device for weight in weights.values()}
    kinds = {device.type for device in devices}
    if len(kinds) > 1 and method == "int4":
        raise ValueError(
            f"{function}: the layers are on {' and '.join(sorted(kinds))}: name those of one device in layers="
        )
    config = _config(method, size, devices, function)
    skipped = {} if method != "int4" else _not_fitting(weights, size)
    if len(skipped) == len(weights):
        name, why = next(iter(skipped.items()))
        raise ValueError(f"{function}: no layer can be quantised: {shown(name)}: {why}")
    named = layers is not None and (isinstance(layers, nn.Module) or not callable(layers))
    if named and skipped:
        name, why = next(iter(skipped.items()))
        raise ValueError(f"{function}: {shown(name)} cannot be quantised: {why}")
    todo = {name: module for name, module in chosen.items() if name not in skipped}
    _try(todo, config, function)
    note = _NO_GRADIENTS.get(method) if isinstance(method, str) else None
    return carry_out(model, function, partial(_quantize, model, todo, config, skipped, note), evaluate)


def _is_linear(module: nn.Module) -> bool:
    """True for layers that torchao's own filter takes, and for torch.ao's quantised ones, which are refused by name."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    return isinstance(module, nn.Linear) or (
        type(module).__module__.startswith("torch.ao.nn.") and type(module).__name__ == "Linear"
    )


def _group_size(method: Any, group_size: Any) -> int:
    if group_size is None:
        return 128
    if method != "int4":
        raise ValueError(f"group_size={group_size!r} applies to method='int4' only")
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size={group_size!r}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size={group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    return group_size


def _config(method: Any, size: int, devices: set[torch.device], function: str) -> Any:
    torchao = library("torchao.quantization", "torchao", function)
    if method == "int8_weight_only":
        return torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    if method == "int8_dynamic":
        return torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if method == "int4" and {device.type for device in devices} == {"cpu"}:
        prototype = library("torchao.prototype.quantization.int4", "torchao", function)
        return prototype.PrototypeInt4WeightOnlyConfig(group_size=size, set_inductor_config=False)
    if method == "int4":
        for device in sorted(devices, key=str):
            if what := _without_int4(device):
                raise NotImplementedError(
                    f"{function}: there are no kernels for {what}: it takes a CUDA device of compute capability 8.0 or "
                    "later, or the CPU"
                )
        return torchao.Int4WeightOnlyConfig(
            group_size=size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    core = library("torchao.core.config", "torchao", function)
    if not isinstance(method, core.AOBaseConfig) or isinstance(method, torchao.FqnToConfig):
        raise TypeError(
            f"method: {type(method).__name__} is neither one of {', '.join(map(repr, METHODS))} nor a config of "
            "torchao for layers of one kind"
        )
    return method


def _without_int4(device: torch.device) -> str | None:
    """Return the name of a device for which torchao has no int4 kernels, None for others."""
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"{device}, of compute capability {major}.{minor}"


def _not_fitting(weights: Mapping[str, torch.Tensor], size: int) -> dict[str, str]:
    """Return the reason why int4 does not apply to a layer."""
    found = {}
    for name, weight in weights.items():
        outputs, inputs = weight.shape
        if inputs % size:
            smaller = [str(one) for one in GROUP_SIZES if inputs % one == 0]
            found[name] = f"its {inputs} inputs are not a multiple of group_size={size}" + (
                f": group_size={smaller[-1]} would do" if smaller else ""
            )
        elif weight.device.type == "cpu" and outputs % 16:
            found[name] = f"its {outputs} outputs are not a multiple of 16, which the CPU's kernel needs"
    return found


def _try(chosen: Mapping[str, nn.Module], config: Any, function: str) -> None:
    """Quantise and run a copy of some rows of the first layer of each kind.

    Raises NotImplementedError if that fails."""
    from torchao.quantization import quantize_ as quantize

    seen: set[tuple[torch.device, torch.dtype]] = set()
    for name, module in chosen.items():
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if (weight.device, weight.dtype) in seen:
            continue
        seen.add((weight.device, weight.dtype))
        rows = weight.detach()[:_TRIED_ROWS]
        copy = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        copy.weight = nn.Parameter(rows, requires_grad=False)
        try:
            with torch.no_grad():
                quantize(copy, config, filter_fn=_everything)
                copy(torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device))
        except Exception as error:
            raise NotImplementedError(
                f"{function}: {weight.device} has no kernels for it in {str(weight.dtype).removeprefix('torch.')}, as "
                f"tried on a copy of {shown(name)}: {type(error).__name__}: {error}"
            ) from error


def _everything(module: nn.Module, name: str) -> bool:
    return True


def _untied(model: nn.Module, chosen: Mapping[str, nn.Module]) -> list[str]:
    """Return a note on weights that other modules share, such as an embedding."""
    weights = {id(module._parameters["weight"]): name for name, module in chosen.items()}
    here = {f"{name}.weight" if name else "weight" for name in chosen}
    return [
        f"{name} was tied to the weight of {shown(weights[id(p)])}, and remains in memory beside it"
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in weights and name not in here
    ]


def _quantize(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    config: Any,
    skipped: Mapping[str, str],
    note: str | None,
    outcome: Outcome,
) -> None:
    from torchao.quantization import quantize_ as quantize

    outcome.skipped.update(skipped)
    outcome.notes.extend(_untied(model, chosen))
    made: dict[int, nn.Parameter | None] = {}
    for name, module in chosen.items():
        weight = module._parameters["weight"]
        if id(weight) not in made:
            made[id(weight)] = _quantized(module, config, quantize)
        new = made[id(weight)]
        if new is None:
            outcome.skipped[name or "the model itself"] = "torchao leaves it as it is with this config"
        else:
            module._parameters["weight"] = new
            outcome.changed.append(name or "the model itself")
    if not outcome.changed:
        raise ValueError(f"quantize_: torchao leaves all layers as they are with {config}")
    if note:
        outcome.notes.append(note)


def _quantized(module: nn.Module, config: Any, quantize: Callable[..., None]) -> nn.Parameter | None:
    """Return the module's new weight; None if there is none, and the module is unchanged."""
    standing = dict(module.__dict__), dict(module._parameters)
    quantize(module, config, filter_fn=_everything)
    new = module._parameters["weight"]
    assert new is not None
    # What torchao prints of the module is a function that cannot be pickled: a model could not be saved whole.
    module.__dict__.pop("extra_repr", None)
    if "extra_repr" in standing[0]:
        module.__dict__["extra_repr"] = standing[0]["extra_repr"]
    if type(new.data) is not torch.Tensor:
        return new
    module.__dict__.update(standing[0])
    module._parameters.update(standing[1])
    return None
