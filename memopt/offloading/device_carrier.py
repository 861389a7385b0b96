"""Parameters in page-locked host memory, and their way to a CUDA device and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memopt.log import logger
from memopt.offloading.layer_copies import DeviceCopy, Inward, Outward
from memopt.offloading.visiting_parameter import visiting


class DeviceCarrier:
    """typical: a layer's bytes; of copies there are two such at once, where there is no budget. most: the largest
    layer's. budget: of live bytes on the device, whatever they are."""

    copies = True

    def __init__(self, device: torch.device, typical: int, most: int, budget: int | None) -> None:
        self.device, self.typical, self.budget = device, typical, budget
        self.inward, self.outward = Inward(device), Outward(device, most)
        self._room = _Room(device, budget) if budget is not None else None

    def travels(self, parameter: torch.Tensor) -> bool:
        return bool(parameter.device.type == "cpu")

    def fetch(self, parameters: Sequence[torch.Tensor]) -> Sequence[DeviceCopy]:
        return self.inward.fetch(parameters)

    def stand_in(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return visiting(parameter, copy, self.outward)

    def drop(self, copy: DeviceCopy) -> None:
        """Its memory goes with it."""

    def settle(self) -> None:
        self.inward.settle()

    def finish(self) -> None:
        self.outward.finish()

    def allowance(self, wanted: int) -> int:
        if self._room is not None:
            return self._room.left
        return beside(self.typical) + max(self.typical - wanted, 0)

    def passed(self, grad_mode: bool) -> None:
        if self._room is not None:
            self._room.begin(grad_mode)


def beside(typical: int) -> int:
    """Bytes of copies beside those in use: a layer's, and those of the small ones around it."""
    return typical + typical // 16


class _Room:
    """What a budget leaves for copies that are not in use: the first pass of a kind (with a graph, or without) runs
    with none. Whatever its peak was, so many bytes more at any time stay within the budget."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device, self.budget = device, budget
        self.left = 0
        self._least: dict[bool, int] = {}  # the peak with nothing beside what is in use
        self._kind: bool | None = None
        self._warned = False
        torch.cuda.reset_peak_memory_stats(device)

    def begin(self, grad_mode: bool) -> None:
        """A pass begins: what the last one took is known."""
        if self._kind is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            self._least[self._kind] = max(self._least.get(self._kind, 0), peak - self.left)
            if peak > self.budget and not self._warned:
                self._warned = True
                logger.warning(
                    "offload_layers: the step took %d bytes of the device with one layer there at a time: more than "
                    "memory_budget=%d. Smaller layers (layers=), checkpointing or a smaller batch take less",
                    peak - self.left,
                    self.budget,
                )
        self._kind = grad_mode
        least = self._least.get(grad_mode)
        self.left = 0 if least is None else max(self.budget - least, 0)
