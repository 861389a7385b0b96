"""Visits of offloaded parameters to the device, one for each run of a stage of auto_checkpoint's plan.

A planned model's stages bring the parameters that they use: the call of a layer leaves it to them, and a stage that
runs again does not go through that call. What is measured of a stage has its visit in it, in each direction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from memopt._offload.carriers import beside
from memopt._offload.layer_residency import LayerResidency
from memopt._offload.model_layers import Layer, ParameterSlot, nbytes

NAME = "_call_impl"  # what Module.__call__ calls: the hooks, and forward between them


def residency_of(model: nn.Module) -> LayerResidency | None:
    """Return the residency that brings a module's parameters: of a model that offload_layers() was called with, all."""
    residency: LayerResidency | None = getattr(model.__dict__.get(NAME), "residency", None)
    return residency


def mapped_bytes(residency: LayerResidency) -> int:
    """Return the bytes of a file's pages that are in memory at once: no stage shows them, since nothing is copied."""
    if residency.carrier.copies:
        return 0
    largest = max(nbytes(layer.parameters()) for layer in residency.layers)
    return largest + beside(residency.carrier.typical)


def at_home(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function: the visit of parameters that live where they are used."""
    return function(*args, **kwargs)


class Visit:
    """Calls functions with some of a layer's parameters in place. slots: these."""

    def __init__(self, residency: LayerResidency, layer: Layer, slots: Sequence[ParameterSlot]) -> None:
        self.residency, self.layer, self.slots = residency, layer, slots

    @staticmethod
    def of(
        residency: LayerResidency | None, module: nn.Module, used: Collection[nn.Module]
    ) -> Callable[..., Any]:
        """Return the visit of what these modules own in the layer that the module is in. Other layers' modules bring
        their own when they are called."""
        layers = () if residency is None else residency.layers
        for layer in layers:
            if layer.module is module or (layer.whole and module in set(layer.module.modules())):
                slots = [slot for slot in layer.slots if slot.owner in used]
                return Visit(residency, layer, slots) if residency is not None and slots else at_home
        return at_home

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self.residency.run_layer(self.layer, self.slots, function, args, kwargs, by_stage=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the model is plain."""
        return at_home


class VisitingStage:
    """The forward of a module that is a stage, with its parameters in place."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, visit: Callable[..., Any]) -> None:
        self.function, self.__self__, self.visit = function, module, visit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.visit(self.function, *args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.function)
