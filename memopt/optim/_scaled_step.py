"""A gradient scaler's part in a step: the factor of the gradients, the flag that skips it, what is kept in .grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.optim._offloaded_gradients import HostGradient


class ScaledStep:
    """A gradient scaler's part in one step.

    found_inf, grad_scale: as torch's scaler sets them. factors: of each device the fp32 number by which gradients are
    multiplied, instead of grad_scale; p.grad is then kept as it was used only with unscaled_grads.
    """

    __slots__ = ("_kept", "factors", "found_inf", "grad_scale", "store")

    def __init__(
        self,
        found_inf: Any,
        grad_scale: Tensor | None,
        factors: dict[torch.device, Tensor] | None = None,
        unscaled_grads: bool = False,
    ) -> None:
        # torch's is 0 without gradients.
        self.found_inf: Tensor | None = found_inf if isinstance(found_inf, Tensor) else None
        self.grad_scale, self.factors = grad_scale, factors
        self.store = grad_scale is not None if factors is None else unscaled_grads
        self._kept: list[tuple[Tensor, Tensor]] = []  # what the step has put into .grad

    def factor(self, device: torch.device) -> Tensor | None:
        if self.factors is not None:
            if device in self.factors:
                return self.factors[device]
            raise RuntimeError(
                f"the scaler gave no factor for {device}: call the scaler's step() with the gradients that it has seen"
            )
        if self.grad_scale is None:
            return None
        scale: Tensor = self.grad_scale.detach().to(device, non_blocking=True)
        return scale.double().reciprocal().float()  # as GradScaler.unscale_ rounds it

    def found_inf_on(self, device: torch.device) -> Tensor | None:
        if self.found_inf is None:
            return None
        return self.found_inf.detach().to(device=device, dtype=torch.float32, non_blocking=True)

    def is_skipped_on_cpu(self) -> bool:
        """Return whether the step is skipped, as far as that is known without waiting."""
        return self.found_inf is not None and self.found_inf.device.type == "cpu" and self.is_skipped()

    def is_skipped(self) -> bool:
        return self.found_inf is not None and bool(self.found_inf.item() != 0)

    def scaled(self, params: list[Tensor], device: torch.device) -> list[Tensor]:
        factor = self.factor(device)
        grads = [p.grad if factor is None else p.grad * factor for p in params]
        if self.store:
            for p, grad in zip(params, grads, strict=True):
                self.keep(p, grad)
        return grads

    def keep(self, p: Tensor, grad: Tensor) -> None:
        p.grad = grad
        self._kept.append((p, grad))

    def store_all(self, parameters: list[Tensor]) -> None:
        """After a step in turns, which has put back what was in .grad: have there what the step has used."""
        for p, grad in self._kept:
            if type(p.grad) is not HostGradient:
                p.grad = grad
        for p in parameters if self.store else ():
            factor = self.factor(p.device) if type(p.grad) is HostGradient else None
            if factor is not None:
                found_inf = self.found_inf_on(p.device)  # then the step has left them as they were
                p.grad.multiply(factor if found_inf is None else torch.where(found_inf == 0, factor, 1.0))
