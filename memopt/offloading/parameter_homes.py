"""Where offloaded parameters live, and how a model moves in and out. The nn.Parameter objects stay what they are:
optimizers, hooks and ties hold on to them; it is their data that moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from memopt.offloading.home_memory import Block, room
from memopt.offloading.model_layers import Layer

MakeBlock = Callable[[int], Block]


class ParameterHomes:
    """The parameters of some layers, each once, and the buffers of the model.

    make_block: takes the memory for one layer. Raises what that raises, before anything has changed."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], make_block: MakeBlock) -> None:
        self.blocks: dict[int, Block] = {}  # by the address of the values
        self._moves: list[tuple[nn.Parameter, torch.Tensor, torch.device]] = []
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        self.model, self.nbytes = model, 0
        seen: set[int] = set()
        for layer in layers:
            parameters = [p for p in layer.parameters() if id(p) not in seen]
            seen.update(map(id, parameters))
            if not parameters:
                continue
            block = make_block(sum(map(room, parameters)))
            for p in parameters:
                host = block.take(p.detach())
                host.copy_(p.detach())
                self._moves.append((p, host, p.device))
                self.blocks[host.data_ptr()] = block
                self.nbytes += p.nbytes

    def move_in(self, device: torch.device) -> None:
        """The parameters' data become those at home; buffers go to the device that computes. All memory is taken before
        anything changes."""
        grads = [None if p.grad is None else p.grad.to("cpu") for p, *_ in self._moves]
        buffers = _buffers_on(self.model, device)
        for (p, host, _), grad in zip(self._moves, grads, strict=True):
            set_data(p, host, grad)
        for module, name, value in buffers:
            before = module._buffers[name]
            assert before is not None
            self._buffers.append((module, name, before.device))
            module._buffers[name] = value

    def move_out(self) -> None:
        """As it was before move_in(), on the devices of then, with the values of now. All memory is taken before
        anything changes."""
        found = []
        for p, _, device in self._moves:
            grad = None if p.grad is None else p.grad.to(device, copy=device.type == "cpu")
            # Ordinary memory, also where the home was on the same device; what was assigned since stays where it is.
            at_home = p.data_ptr() in self.blocks
            data = p.detach().to(device, copy=True) if at_home else p.detach()
            found.append((p, data, grad))
        buffers = [
            (module, name, value.to(device))
            for module, name, device in self._buffers
            if (value := module._buffers.get(name)) is not None
        ]
        for p, data, grad in found:
            set_data(p, data, grad)
        tied: dict[int, torch.Tensor] = {}
        for module, name, value in buffers:
            module._buffers[name] = tied.setdefault(id(module._buffers[name]), value)
        self._moves.clear()
        self._buffers.clear()
        self.blocks.clear()


def set_data(p: nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """The same Parameter, the same .grad, elsewhere."""
    kept = p.grad
    p.grad = None
    p.data = data
    if kept is not None:
        assert grad is not None
        with torch.no_grad():
            kept.data = grad
        p.grad = kept


def _buffers_on(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """(module, name, value on the device) of those that are not there; one for modules that share it."""
    tied: dict[int, torch.Tensor] = {}
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                value = tied.setdefault(id(buffer), buffer.to(device))
                found.append((module, name, value))
    return found
