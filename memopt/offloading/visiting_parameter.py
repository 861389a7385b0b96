"""A host parameter in a graph on the device: what a layer computes with while its parameter visits.

    parameter (host) ─ AtHome ─ Visiting ─ what the layer does (device)

The nodes' backward brings the gradient home, once: Visiting's begins the copy, on the device's thread of autograd,
which goes on at once; AtHome's waits for it, on the thread that called backward(), which has nothing else to do. So
hooks of the parameter, accumulation into .grad and torch.autograd.grad find a gradient that is there."""

from __future__ import annotations

from typing import Any

import torch

from memopt.offloading.layer_copies import Outward


class Departure:
    """A gradient on its way."""

    __slots__ = ("copied",)

    def __init__(self) -> None:
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class AtHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, departure: Departure) -> torch.Tensor:
        ctx.departure = departure
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.departure.wait()
        return gradient, None


class Visiting(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        at_home: torch.Tensor,
        copy: torch.Tensor,
        parameter: torch.Tensor,
        departure: Departure,
        outward: Outward,
    ) -> torch.Tensor:
        ctx.visiting, ctx.departure, ctx.outward = parameter, departure, outward
        ctx.set_materialize_grads(False)
        return (
            copy.data
        )  # not detach(), which makes a view, whose own views without a graph would need no gradient

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        if gradient is None:
            home = None
        elif torch.is_grad_enabled() or gradient.layout is not torch.strided:
            home = gradient.to("cpu")  # differentiable, or of no fixed size
            ctx.outward.copied += gradient.nbytes if gradient.layout is torch.strided else 0
        else:
            home, ctx.departure.copied = ctx.outward.send(gradient)
        return home, None, None, None, None


def visiting(parameter: torch.Tensor, copy: torch.Tensor, outward: Outward) -> torch.Tensor:
    """The copy, as what the parameter is on the device: gradients of it are the parameter's."""
    if not parameter.requires_grad or torch.is_inference_mode_enabled():
        return copy
    departure = Departure()
    with torch.enable_grad():
        at_home = AtHome.apply(parameter, departure)
        return Visiting.apply(at_home, copy, parameter, departure, outward)  # type: ignore[no-any-return]
