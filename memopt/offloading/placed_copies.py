"""Copies of parameters in the parameters' places, while a layer runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memopt.offloading.model_layers import Slot


class PlacedCopy:
    """A copy in a parameter's place, from now on."""

    __slots__ = ("_form", "_pointer", "copy", "parameter", "slot")

    def __init__(self, slot: Slot, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        self.slot, self.parameter, self.copy = slot, parameter, copy
        self._form, self._pointer = _form(copy), copy.data_ptr()
        slot.owner._parameters[slot.name] = copy  # type: ignore[assignment]

    def take_out(self) -> None:
        """The parameter is in its place again, unless the layer has put something else there."""
        if self.slot.owner._parameters.get(self.slot.name) is self.copy:
            self.slot.owner._parameters[self.slot.name] = self.parameter  # type: ignore[assignment]

    @property
    def changed(self) -> bool:
        """Whether it was written to, or its .data assigned. What is written in place through .data shows in neither. An
        RNN on a device assigns .data, too, to have its weights in one piece for cuDNN: the same values."""
        if _form(self.copy) != self._form:
            return True
        return self.copy.data_ptr() != self._pointer and not isinstance(self.slot.owner, nn.RNNBase)

    def bring_home(self) -> None:
        value = self.copy.detach()
        if (value.shape, value.dtype) == (self.parameter.shape, self.parameter.dtype):
            with torch.no_grad():
                self.parameter.copy_(value)
        else:
            self.parameter.data = value.to(self.parameter.device)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor._version, tensor.dtype, tensor.size(), tensor.stride()


def take_out(placed: Sequence[PlacedCopy]) -> list[PlacedCopy]:
    """All parameters are in their places again. -> of each that the layer has changed, one copy."""
    for one in placed:
        one.take_out()
    for owner in {one.slot.owner for one in placed}:
        if isinstance(owner, nn.RNNBase):
            owner._init_flat_weights()  # a list besides, which it computes with and holds
    return list({id(one.parameter): one for one in placed if one.changed}.values())
