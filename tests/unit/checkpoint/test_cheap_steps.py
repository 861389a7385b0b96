"""A stage's selective option: what cheap steps made is dropped and made again, products run once."""

from __future__ import annotations

import copy
import os
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt._checkpoint import checked_plan
from memopt._checkpoint.stages.cheap_steps import SELECTIVE
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt.chain import Chain, InfeasibleBudget, Schedule
from tests.helpers import split_models

pytestmark = pytest.mark.usefixtures("one_thread")
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
WIDTH = 32


class Block(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer, self.rate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        hidden = F.dropout(F.gelu(self.inner(self.mixed(x))), self.rate, self.training)
        return x + self.outer(hidden)


class Model(nn.Module):
    def __init__(self, depth: int = 4, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(rate) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def all_selective(chain: Chain, *_: object) -> tuple[Schedule, int]:
    """Every stage that can, drops what cheap steps made; nothing else is recomputed."""
    ways = [
        (k, SELECTIVE) if any(option.name == SELECTIVE for option in stage.options) else (k,)
        for k, stage in enumerate(chain.stages)
    ]
    return Schedule(chain, [("fall", *way) for way in ways] + [("bwd", *way) for way in reversed(ways)]), 0


def gradients(model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model(x))
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    standing, meter = [*model.parameters(), x], Meter(torch.device("cpu"))
    meter.ignore(standing)
    model.zero_grad()
    with meter:
        loss(model(x)).backward()
    return bytes_of(standing) + meter.peak


@pytest.fixture
def selective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_plan, "fastest", all_selective)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_products_run_once_and_the_rest_again_with_the_plain_runs_bits(selective: None, rate: float) -> None:
    torch.manual_seed(1)
    model, x = Model(rate=rate), torch.randn(16, 12, WIDTH)
    plain = copy.deepcopy(model)
    before = peak_of(plain, x)
    memopt.auto_checkpoint(model, x, memory_budget="1GiB", loss=loss)
    assert "what products made" in str(model.plan)
    counts: dict[str, int] = {}
    for kind in (nn.Linear, nn.LayerNorm):
        forward = kind.forward

        def counting(module: nn.Module, x: torch.Tensor, forward=forward, kind=kind) -> torch.Tensor:
            counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
            return forward(module, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "forward", counting)
            found = gradients(model, x)
    assert counts == {"Linear": 17, "LayerNorm": 16}
    assert all(map(torch.equal, found, gradients(plain, x)))
    assert (
        peak_of(model, x) <= model.plan.peak_bytes < (1.0 if rate else 0.8) * before
    )  # a dropout's result is kept


@pytest.mark.parametrize("form", split_models.FORMS)
def test_any_block_within_its_plan_has_the_plain_runs_bits(selective: None, form: str) -> None:
    torch.manual_seed(1)
    model, sample = split_models.make(form, 2, rows=8, length=24)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(
        model,
        sample,
        memory_budget="1GiB",
        loss=lambda out: out["loss"] if isinstance(out, dict) else loss(out),
    )
    for seed in range(2):
        values = []
        for one in (model, plain):
            one.zero_grad()
            torch.manual_seed(seed)
            out = one(**sample)
            value = out["loss"] if isinstance(out, dict) else loss(out)
            value.backward()
            values.append(
                [value, *(p.grad for p in one.parameters() if p.grad is not None), torch.get_rng_state()]
            )
        assert all(map(torch.equal, *values))


def test_other_ways_back_through_the_graph(selective: None) -> None:
    """The graph a second time, a part of it, under autocast, in another shape, and with a hook put on since."""
    torch.manual_seed(1)
    model, x = Model(), torch.randn(8, 12, WIDTH, requires_grad=True)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, x, memory_budget="1GiB", loss=loss)
    for batch in (x, x[:3, :5].contiguous()):
        grads = []
        for one in (model, plain):
            value = loss(one(batch))
            first = torch.autograd.grad(value, [*one.parameters()], retain_graph=True)
            part = torch.autograd.grad(value, one.blocks[2].inner.weight, retain_graph=True)
            grads.append([*first, *part, *torch.autograd.grad(value, [batch, *one.parameters()])])
        assert all(map(torch.equal, *grads))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))
    for one in (model, plain):
        one.blocks[1].mixed.register_forward_hook(lambda m, args, out: out * 2)
    assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))


def test_the_option_is_chosen_where_it_is_faster() -> None:
    """Its time and bytes are real: by the solver, between the plain peak and the least."""
    torch.manual_seed(1)
    model, x = Model(6), torch.randn(64, 16, WIDTH)
    plain = copy.deepcopy(model)
    peak = peak_of(copy.deepcopy(model), x)
    try:
        memopt.auto_checkpoint(model, x, memory_budget=1, loss=loss)
    except InfeasibleBudget as error:
        least = error.least_budget
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    for n in range(40 if SOAK else 4):
        budget = least + int((peak - least) * (n + chance.random()) / (40 if SOAK else 4))
        memopt.auto_checkpoint(model, x, memory_budget=budget, loss=loss)
        assert all(map(torch.equal, gradients(model, x, n), gradients(plain, x, n)))
        assert peak_of(model, x) <= budget
        stages = model.plan.chain.stages[:-1]
        assert sum(any(option.name == SELECTIVE for option in stage.options) for stage in stages) >= 10
