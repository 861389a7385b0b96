"""Everything of a model that a refused or failed compression must leave alone, and models to try it on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn


def kept(model: nn.Module) -> dict[str, Any]:
    """Values are copies; objects are held, so that no other can take their place in memory."""
    return {
        "modules": [
            (
                name,
                module,
                type(module),
                module.training,
                sorted(module.__dict__),
                [list(value) for value in module.__dict__.values() if isinstance(value, dict | set)],
            )
            for name, module in model.named_modules(remove_duplicate=False)
        ],
        "tensors": [
            (name, t, t.dtype, t.layout, t.requires_grad, t.grad, _values(t))
            for name, t in [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        ],
    }


def _values(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach()
    return (tensor.data_ptr(), tensor.detach().clone())


def differences(before: dict[str, Any], model: nn.Module) -> list[str]:
    """The names of what has changed; none for a model that is as it was."""
    after = kept(model)
    found = []
    if len(before["modules"]) != len(after["modules"]):
        found.append("modules")
    for old, new in zip(before["modules"], after["modules"], strict=False):
        if old[1] is not new[1] or (old[0], *old[2:]) != (new[0], *new[2:]):
            found.append(f"module {old[0]}")
    if [one[0] for one in before["tensors"]] != [one[0] for one in after["tensors"]]:
        found.append("names of tensors")
    for old, new in zip(before["tensors"], after["tensors"], strict=False):
        same = old[1] is new[1] and old[2:5] == new[2:5] and old[5] is new[5]
        if same and isinstance(old[6], tuple):
            same = old[6][0] == new[6][0] and torch.equal(
                old[6][1].view(torch.uint8) if old[6][1].dim() else old[6][1],
                new[6][1].view(torch.uint8) if new[6][1].dim() else new[6][1],
            )
        if not same:
            found.append(f"tensor {old[0]}")
    return found


class Residual(nn.Module):
    """Convolutions with a residual connection, norms with buffers, a head."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.third = nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.second(x)
        return self.head(self.drop(self.third(x).relu().mean((2, 3))))


def perceptron(*widths: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class FailsAt:
    """Stands in for a library's function: the call number `nth` raises, the others go through."""

    def __init__(self, function: Any, nth: int) -> None:
        self.function, self.left, self.calls = function, nth, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the library failed")
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return lambda *args, **kwargs: self(instance, *args, **kwargs)
