"""memopt.offload_layers: parameters off the device, copied to it layer by layer."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from memopt import _C
from memopt._checkpoint.shape_plans import PlannedForward, StageForward
from memopt._checkpoint.stages.trace_forward import has_hooks
from memopt._offload.carriers import DeviceCarrier, PageCarrier, beside
from memopt._offload.host_parameters import HostParameters, file_block, locked_block
from memopt._offload.layer_residency import LayerResidency
from memopt._offload.model_layers import (
    Layer,
    ParameterSlot,
    check_model,
    devices_of,
    find_layers,
    nbytes,
)
from memopt._offload.visits import NAME
from memopt._runtime import arguments
from memopt._runtime.results import Result

_EARLIER = {"bytes_at_home": "bytes_offloaded", "bytes_visiting": "bytes_at_once"}


@dataclass(frozen=True, repr=False)
class LayerPlan(Result):
    """The places of a model's bytes. bytes_offloaded: of parameters, off the device; bytes_on_device: of buffers, and
    of what stays there; bytes_at_once: of parameters that are on the device at once, at the most, without a budget."""

    to: str
    device: str
    layers: tuple[tuple[str, int], ...]  # name, bytes
    bytes_offloaded: int
    bytes_on_device: int
    bytes_at_once: int
    memory_budget: int | None = None
    note: str = ""

    def __getattr__(self, name: str) -> int:
        if name not in _EARLIER:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        warnings.warn(f"LayerPlan.{name} is now named {_EARLIER[name]}", DeprecationWarning, stacklevel=2)
        value: int = getattr(self, _EARLIER[name])
        return value

    def __str__(self) -> str:
        if self.note:
            return self.note
        where = "pinned memory of the host" if self.to == "cpu" else f"a file in {self.to}"
        lines = [
            f"{len(self.layers)} layers' parameters, {_C.format_size(self.bytes_offloaded)}, live in {where} and are "
            f"copied to {self.device}, the next while one runs: at most {_C.format_size(self.bytes_at_once)} at once"
            + (f", more within {_C.format_size(self.memory_budget)} in all" if self.memory_budget else ""),
            f"{_C.format_size(self.bytes_on_device)} of buffers stay on {self.device}",
        ]
        width = max(len(name) for name, _ in self.layers) if self.layers else 0
        lines += [
            f"  {name or '(the model itself)':{width}}  {_C.format_size(size):>12}"
            for name, size in self.layers
        ]
        return "\n".join(lines)


class OffloadedLayers(Result):
    """The handle that offload_layers() returns.

    Attributes:
        plan: What lives where.
        bytes_in: Bytes copied to the device so far.
        bytes_out: Bytes copied from the device so far.
    """

    def __init__(
        self, model: nn.Module, plan: LayerPlan, host: HostParameters | None, residency: LayerResidency | None
    ) -> None:
        self.model, self.plan = model, plan
        self._host, self._residency = host, residency

    @property
    def bytes_in(self) -> int:
        carrier = None if self._residency is None else self._residency.carrier
        return carrier.to_device.copied if isinstance(carrier, DeviceCarrier) else 0

    @property
    def bytes_out(self) -> int:
        carrier = None if self._residency is None else self._residency.carrier
        return carrier.to_host.copied if isinstance(carrier, DeviceCarrier) else 0

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values: the plan's, and the bytes copied so far."""
        return self.plan.as_dict() | {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out}

    def release(self) -> None:
        """Free all device copies of parameters.

        This is useful after a failed step, for example, whose copies would otherwise be freed when the next one begins.
        """
        if self._residency is not None:
            self._residency.drop_all()

    def remove(self) -> nn.Module:
        """Restore the plain model: its parameters, with their current values, return to their former device.

        A second call does nothing.

        Returns:
            The model.

        Raises:
            RuntimeError: A graph of the model waits for its backward pass, or the model runs by auto_checkpoint's plan.
                Nothing has changed then, as with the next.
            torch.OutOfMemoryError: The device has no room for the parameters.
        """
        if self._residency is None or self._host is None:
            return self.model
        if planned(self.model) is not None:
            raise RuntimeError(
                "offload_layers: the model runs by auto_checkpoint's plan, which counts its parameters off the device: "
                "call memopt.undo_checkpoint(model) before .remove(), and auto_checkpoint() again after it"
            )
        if self._residency.is_wanted():
            raise RuntimeError(
                "offload_layers: a backward pass through this model is still pending: run it, or drop its loss and "
                "outputs, before .remove()"
            )
        self._residency.drop_all()
        self._host.move_out()
        _uninstall(self.model)
        self._residency = self._host = None
        return self.model

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.model).__name__}: {self.plan}>"


class LayerCall:
    """Stands in a module as its _call_impl; the class's own is called with the parameters on the device."""

    def __init__(
        self, module: nn.Module, residency: LayerResidency, layer: Layer, slots: Sequence[ParameterSlot]
    ) -> None:
        self.module, self.residency, self.layer, self.slots = module, residency, layer, slots
        self.own: Callable[..., Any] = getattr(module, NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.module.__dict__.get("forward")
        if torch.is_grad_enabled() and getattr(forward, "visits", False) and not has_hooks(self.module):
            return self.own(*args, **kwargs)  # by a plan, whose stages bring what they use
        return self.residency.run_layer(self.layer, self.slots, self.own, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the model that is plain, on the host."""
        module = memo.get(id(self.module))
        return (
            copy.deepcopy(self.own, memo) if module is None else getattr(type(module), NAME).__get__(module)
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an offloaded model cannot be pickled: save model.state_dict(), or .remove() the handle that "
            "offload_layers() returned first"
        )


class ModelCall(LayerCall):
    """The call of the model itself, within which its layers are called."""

    def __init__(self, module: nn.Module, residency: LayerResidency) -> None:
        self.module, self.residency = module, residency
        self.own = getattr(module, NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.residency.run_model(self.own, args, kwargs)
        except RuntimeError as error:
            if "same device" in str(error) and not getattr(error, "__notes__", None):
                error.add_note(
                    "offload_layers: is a parameter used outside the call of the layer it belongs to? Name the module "
                    "that uses it in layers="
                )
            raise


def offload_layers(
    model: nn.Module,
    to: str | os.PathLike[str] = "cpu",
    memory_budget: int | float | str | None = None,
    *,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | str | int | None = None,
) -> OffloadedLayers:
    """Keep a model's parameters off its compute device, and copy them there layer by layer, in training too.

    The nn.Parameter objects remain, with their names, hooks and ties. To optimizers they and their .grad are host
    tensors. Create the optimizer afterwards, or load its state_dict() again, so that its states are on the host too.
    What a layer's forward writes to its parameters, or assigns to their .data, is copied back when it ends. What is
    written in place through .data on a device (p.data.mul_()) is lost, because it cannot be detected: write under
    torch.no_grad(). Buffers stay on the device. Losses and gradients are bit-equal to the plain model's; random states,
    autocast, checkpointing, accumulation and state_dict() work as before. In a step a layer's parameters are copied to
    the device for its forward, and the saved ones again for its backward, unless they are still there; gradients are
    copied from it once.

    memopt.auto_checkpoint() afterwards plans such a model too: a stage's bytes and seconds then have the visit of its
    parameters in them.

    Args:
        model: The module whose parameters leave the device, in place.
        to: "cpu", for a model that computes on a CUDA device: page-locked host memory, from which the next layer's
            parameters are copied while one runs, and into which each gradient is copied when it is ready. A directory:
            an unnamed file in it, mapped into memory; also for a model that computes on the CPU, whose parameters then
            take memory only while their layer runs. The file is gone with the process: state_dict() is the checkpoint.
        memory_budget: The most live bytes on the device in a step, everything counted: bytes, "8GiB", or a fraction (a
            float) of the device's memory. The part that a step does not need keeps layers on the device and fetches
            more of them ahead; by default that is the size of one block beside the layer that runs. The first step
            measures that part with the device's peak counter, which is reset here. While the model runs by
            auto_checkpoint's plan, that one's budget counts instead.
        layers: Modules, or their names, whose parameters are copied and freed together; by default the blocks of the
            model's lists of modules, and the modules around them one by one. A parameter may be used only while a
            module of its layer is called.
        device: The device that the model computes on; by default its parameters' device, or the current CUDA device if
            they are on the CPU and there is one.

    Returns:
        A handle: .plan describes what lives where, .remove() restores the plain model.

    Raises:
        ValueError: The model cannot be offloaded (parametrized, compiled, wrapped by DDP or FSDP, sparse, on two
            devices), or an argument has an invalid value; nothing has changed.
        TypeError: An argument has the wrong type; nothing has changed.
        MemoryError: The host has too little memory for the parameters.
        OSError: The directory has no room for them.

    Examples:
        >>> handle = memopt.offload_layers(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    check_model(model)
    _check_new(model)
    on = _device(model, device)
    where = os.fspath(to)
    if where != "cpu" and not os.path.isdir(where):
        raise ValueError(
            f"to={where!r}: expected 'cpu', or a directory in which the parameters' file can be created"
        )
    found = find_layers(model, layers)
    if not found:
        raise ValueError(f"offload_layers: {type(model).__name__} has no parameters")
    sizes = tuple((layer.name, nbytes(layer.parameters())) for layer in found)
    buffers = nbytes({id(b): b for b in model.buffers()}.values())
    budget = None if memory_budget is None else arguments.budget(memory_budget, on)
    largest = max(size for _, size in sizes)
    typical = typical_layer([size for _, size in sizes])
    if budget is not None and budget < largest + buffers:
        raise ValueError(
            f"memory_budget={memory_budget}: the largest layer's parameters take {largest} bytes and the buffers "
            f"{buffers}; gradients and activations come on top. Name smaller layers in layers=, or raise memory_budget"
        )
    if on.type == "cpu" and where == "cpu":
        note = (
            "nothing is offloaded: the model computes on the CPU, and its parameters are in the host's memory "
            "already. Pass a directory as to= to keep them in a file, or device= to compute on a CUDA device"
        )
        warnings.warn(note, stacklevel=2)
        return OffloadedLayers(model, LayerPlan(where, "cpu", sizes, 0, buffers, 0, budget, note), None, None)

    def make_block(size: int) -> Any:
        return locked_block(on, size) if where == "cpu" else file_block(where, size)

    host = HostParameters(model, found, make_block)
    carrier: DeviceCarrier | PageCarrier
    if on.type == "cuda":
        carrier = DeviceCarrier(on, typical, largest, budget)
    else:
        carrier = PageCarrier(host.blocks, typical, budget)
    residency = LayerResidency(found, carrier)
    host.move_in(on)
    _install(model, residency)
    plan = LayerPlan(where, str(on), sizes, host.nbytes, buffers, largest + beside(typical), budget)
    return OffloadedLayers(model, plan, host, residency)


def offloaded(model: nn.Module) -> str | None:
    """The name of the first module of it whose parameters are offloaded; None where there is none."""
    found = (name for name, one in model.named_modules() if isinstance(one.__dict__.get(NAME), LayerCall))
    return next(found, None)


def _check_new(model: nn.Module) -> None:
    if (name := offloaded(model)) is not None:
        whose = f"{name!r} in it" if name else "the model"
        raise ValueError(f"offload_layers: {whose} is already offloaded: .remove() its handle first")
    if (name := planned(model)) is not None:
        raise ValueError(
            f"offload_layers: {name or 'the model'} runs by auto_checkpoint's plan, which was made with its parameters "
            "on the device: call memopt.undo_checkpoint(model), then offload_layers() and, after it, auto_checkpoint()"
        )


def planned(model: nn.Module) -> str | None:
    """The name of the first module of it that runs by a plan of auto_checkpoint(); None where there is none."""
    kinds = StageForward, PlannedForward
    found = (name for name, one in model.named_modules() if isinstance(one.__dict__.get("forward"), kinds))
    return next(found, None)


def _device(model: nn.Module, device: torch.device | str | int | None) -> torch.device:
    there = devices_of(model)
    if len(there) > 1:
        raise ValueError(
            f"offload_layers: the model's parameters are on {', '.join(map(str, there))}: move them to one device"
        )
    if device is not None:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    elif there and there[0].type == "cuda":
        chosen = there[0]
    else:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: expected a CUDA device or the CPU")
    if chosen.type == "cpu" and there and there[0].type == "cuda":
        raise ValueError(f"device={device!r}: the model is on {there[0]}; model.cpu() first")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def typical_layer(sizes: Sequence[int]) -> int:
    """Half of all bytes are in layers of that size or larger."""
    half, found = sum(sizes) / 2, 0
    for found in sorted(sizes, reverse=True):
        half -= found
        if half <= 0:
            break
    return found


def _install(model: nn.Module, residency: LayerResidency) -> None:
    """Layers, and what is in them: a part of a layer may be called by itself, when a checkpointed region runs again."""
    for layer in residency.layers:
        if not layer.whole:
            if layer.module is not model:
                layer.module.__dict__[NAME] = LayerCall(layer.module, residency, layer, layer.slots)
            continue
        for module in layer.module.modules():
            inside = set(module.modules())
            slots = layer.slots
            if module is not layer.module:
                slots = tuple(slot for slot in layer.slots if slot.owner in inside)
            if slots and NAME not in module.__dict__:
                module.__dict__[NAME] = LayerCall(module, residency, layer, slots)
    root = next((layer for layer in residency.layers if layer.module is model), None)
    if root is not None:
        model.__dict__.pop(NAME, None)
        model.__dict__[NAME] = LayerCall(model, residency, root, root.slots)
    model.__dict__[NAME] = ModelCall(model, residency)


def _uninstall(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module.__dict__.get(NAME), LayerCall):
            del module.__dict__[NAME]
