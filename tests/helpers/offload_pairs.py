"""A model twice, with an optimizer each, the second one's gradients or states on the host; and ways to train them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import memopt.amp
import memopt.optim
from memopt.optim._offloaded_gradients import HostGradient
from tests.helpers.offloaded_models import Transformer, words_of

STEPS = 200 if os.environ.get("MEMOPT_SOAK") == "1" else 5
SEED = int(os.environ["MEMOPT_SEED"])

Run = tuple[nn.Module, torch.optim.Optimizer]


def pair(kind: Any = memopt.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> list[Run]:
    """The same model twice, with its optimizer; the second one's gradients leave, or what `options` say of it."""
    torch.manual_seed(SEED)
    plain = Transformer(dropout=0).to("cuda", dtype)
    other = copy.deepcopy(plain)
    others = [k for k in options if k.startswith("offload_") or k == "step_in_backward"]
    leaving = {"offload_gradients": "step_in_backward" not in others} | {k: options.pop(k) for k in others}
    return [
        (model, kind(model.parameters(), **{"lr": 0.01} | options | offload))
        for model, offload in ((plain, {}), (other, leaving))
    ]


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return model(words_of(model, seed=seed).cuda()).float().square().mean()  # type: ignore[no-any-return]


def away(model: nn.Module) -> bool:
    return all(type(p.grad) is HostGradient for p in model.parameters() if p.requires_grad)


def same(both: list[Run]) -> None:
    (plain, first), (other, second) = both
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        states = first.state.get(a, {}), second.state.get(b, {})
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name].cpu(), states[1][name].cpu()) for name in states[0])


# ---- ways to train: what a step's script does ------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    optimizer.zero_grad()
    loss_of(model, n).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for micro in range(4):
        (loss_of(model, 10 * n + micro) / 4).backward()
    memopt.amp.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    model.zero_grad()  # of the model: its gradients are dropped like any


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    optimizer.zero_grad()
    loss_of(model, n).backward()
    norm = memopt.amp.clip_grad_norm_(model.parameters(), 0.01)
    assert torch.isclose(memopt.amp.clip_grad_norm_(model.parameters(), 1e9), norm.clamp(max=0.01), rtol=1e-2)
    optimizer.step()


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    """Two steps with the same gradients, and one more that adds to what was clipped."""
    clipped(model, optimizer, n)
    optimizer.step()
    loss_of(model, n + 1).backward()
    optimizer.step()


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    def evaluated() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, n)
        loss.backward()
        return loss

    assert optimizer.step(evaluated) > 0


class Scaled:
    """A scaler's step; in some an inf is found."""

    def __init__(self, *, unscale: bool = False, max_norm: float | None = None) -> None:
        self.unscale, self.max_norm = unscale, max_norm
        self.scalers: dict[int, Any] = {}

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
        scaler = self.scalers.setdefault(
            id(optimizer), memopt.amp.GradScaler(init_scale=2.0**8, growth_interval=2)
        )
        optimizer.zero_grad()
        loss = loss_of(model, n) * (float("inf") if n % 3 == 1 else 1)
        scaler.scale(loss).backward()
        if self.unscale:
            scaler.unscale_(optimizer)
            memopt.amp.clip_grad_norm_(model.parameters(), 0.01)
        if self.max_norm is None:
            scaler.step(optimizer)
        else:
            scaler.step(optimizer, max_norm=self.max_norm)
            assert scaler.gradient_norm(optimizer).isfinite() == (n % 3 != 1)
        assert scaler.step_skipped(optimizer) == (n % 3 == 1)
        scaler.update()


WAYS: dict[str, Callable[[], Any]] = {
    "step": lambda: step,
    "accumulated": lambda: accumulated,
    "clipped": lambda: clipped,
    "twice": lambda: twice,
    "closure": lambda: closure,
    "scaled": Scaled,
    "unscaled": lambda: Scaled(unscale=True),
    "scaled, clipped": lambda: Scaled(max_norm=0.01),
}


def muon(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Of matrices; the other parameters are frozen."""
    matrices = []
    for p in parameters:
        p.requires_grad_(p.ndim == 2)
        matrices += [p] if p.ndim == 2 else []
    return memopt.optim.Muon(matrices, **options)


KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "8 bits of bf16": {"dtype": torch.bfloat16, "state_bits": 8, "min_8bit_size": 256},
    "4 bits": {"state_bits": 4, "min_8bit_size": 256},
    "factored": {"state_bits": 4, "factored": True, "min_8bit_size": 256},
    "stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True},
    "SGD": {"kind": memopt.optim.SGD, "momentum": 0.9, "dampening": 0.5},
    "SGD of 8 bits": {
        "kind": memopt.optim.SGD,
        "momentum": 0.9,
        "nesterov": True,
        "state_bits": 8,
        "min_8bit_size": 256,
    },
    "Muon": {"kind": muon},
    "Muon of 8 bits": {"kind": muon, "state_bits": 8, "min_8bit_size": 256},
}


def deep(offload: bool, layers: int = 24) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A model whose gradients are nearly all that a step takes; the bytes of a layer's."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers))).cuda()
    return model, memopt.optim.SGD(model.parameters(), lr=0.1, offload_gradients=offload), 4 * 256 * 256
