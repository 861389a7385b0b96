"""Objects that a stage is given and changes: each run finds what the first one found, and the caller's changes once."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt._checkpoint.stages.argument_objects import ArgumentObject, is_changeable
from memopt.chain import InfeasibleBudget

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 16


class Layer:
    """A layer's cache, as libraries of transformers have it."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.lock = threading.Lock()

    def update(self, keys: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= n:
            self.layers.append(Layer())
        layer = self.layers[n]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], dim=-2)
        layer.values = values if layer.values is None else torch.cat([layer.values, values], dim=-2)
        return layer.keys, layer.values


class Attention(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.norm, self.qkv, self.out = (
            n,
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if isinstance(cache, dict):
            cache["calls"].append(self.n)
            k, v = cache["cache"].update(k, v, self.n)
        elif cache is not None:
            k, v = cache.update(k, v, self.n)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Kept(dict[str, Any]):
    """A dictionary that pytree takes for a leaf."""


class Decoder(nn.Module):
    def __init__(self, makes: type) -> None:
        super().__init__()
        self.first, self.makes = nn.Linear(WIDTH, WIDTH), makes
        self.blocks = nn.ModuleList(Attention(n) for n in range(6))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache: Any = Cache()
        if self.makes is Kept:
            cache = Kept(cache=cache, calls=[])
        x = self.first(x)
        for block in self.blocks:
            x = block(x, cache=cache)
        return {"loss": x.square().mean(), "cache": cache}


@pytest.mark.parametrize("makes", [Cache, Kept])
def test_a_cache_that_each_block_fills_is_as_in_the_plain_run(makes: type) -> None:
    torch.manual_seed(1)
    model = Decoder(makes)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 32, WIDTH)
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, x, memory_budget=1)
    memopt.auto_checkpoint(model, x, memory_budget=error.value.least_budget)
    assert model.plan.runner is not None
    found = []
    for module in (model, plain):
        out = module(x)
        out["loss"].backward()
        found.append(out)
    assert torch.equal(found[0]["loss"], found[1]["loss"])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    caches = [out["cache"] for out in found]
    if makes is Kept:
        assert caches[0]["calls"] == list(range(6))
        caches = [cache["cache"] for cache in caches]
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


def test_a_copy_has_its_own_containers_and_the_same_tensors() -> None:
    cache = Cache()
    first = torch.ones(2, 3, requires_grad=True)
    cache.update(first * 2, first, 0)
    cache.layers.append(cache.layers[0])
    held = ArgumentObject(cache)
    cache.update(first, first, 0)
    made = held.again()
    assert made.lock is cache.lock
    assert made.layers[0] is made.layers[1]
    assert made.layers[0] is not cache.layers[0]
    assert made.layers[0].keys.shape == (2, 3)
    assert made.layers[0].values is first
    assert made.layers[0].keys.requires_grad
    assert made.layers[0].keys.grad_fn is None
    made.layers.clear()
    assert len(held.again().layers) == 2


def test_what_is_copied_in_another_way_is_left_alone(tmp_path: Any) -> None:
    class Single:
        def __reduce__(self) -> str:
            return "single"

    with open(tmp_path / "file", "w") as file:
        for value in (
            file,
            Single(),
            nn.Linear(1, 1),
            torch.ones(1),
            len,
            "text",
            torch.float32,
            threading.Lock(),
        ):
            assert not is_changeable(value)
