"""memopt.optim's optimizers beside torch's: the same parameters and gradients for both, and whether they agree."""

from __future__ import annotations

import os

import torch

import memopt.optim
from memopt.optim._scaled_step import ScaledStep

PAIRS = {
    "adamw": (memopt.optim.AdamW, torch.optim.AdamW),
    "adam": (memopt.optim.Adam, torch.optim.Adam),
    "sgd": (memopt.optim.SGD, torch.optim.SGD),
}
SHAPES = [(4,), (33, 7), (), (0,), (1, 1), (300,), (5, 3, 4, 4)]
SEED = int(os.environ["MEMOPT_SEED"])
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def generator(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + number)


def parameters(dtype=torch.float32, shapes=SHAPES, number: int = 0) -> list[torch.nn.Parameter]:
    make = generator(number)
    return [torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in shapes]


def give_gradients(*lists: list[torch.nn.Parameter], number: int) -> None:
    """The same gradients to the parameters of each list; each its own tensor."""
    make = generator(1000 + number)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=make)
        for p in same:
            p.grad = grad.to(p.dtype).clone()


def both(kind: str, dtype=torch.float32, shapes=SHAPES, stock=None, **options):
    """The same parameters under memopt's optimizer and under torch's."""
    ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    new, old = PAIRS[kind]
    return new(ours, **options), old(theirs, **{**options, **(stock or {})}), ours, theirs


def scaled_step(
    optimizer, factor, found_inf=None, *, grad_scale=None, unscaled_grads=False, device="cpu"
) -> None:
    """A step as memopt's scaler has it taken, without the scaler."""
    scaled = ScaledStep(found_inf, grad_scale, {torch.device(device): factor}, unscaled_grads)
    optimizer._memopt_step(lambda _: scaled)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """By norm, relative."""
    a = torch.cat([t.detach().double().flatten() for t in ours])
    b = torch.cat([t.detach().double().flatten() for t in theirs])
    return float((a - b).norm() / b.norm())


def bits(tensors) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def same_bits(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
