"""step_in_backward=True: a training ends with the bits of one whose steps come after backward(), and holds one gradient
at a time; whoever needs a gradient afterwards is told that it is gone."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
import memopt.amp
import memopt.optim
from memopt.optim._backward_steps import SteppedGradient
from memopt.optim._one_pass import OnePass

SEED = int(os.environ["MEMOPT_SEED"])
KINDS: dict[str, tuple[type, torch.dtype, dict[str, Any]]] = {
    "AdamW": (memopt.optim.AdamW, torch.float32, {}),
    "Adam with amsgrad": (memopt.optim.Adam, torch.float64, {"amsgrad": True, "weight_decay": 0.1}),
    "8 bits": (memopt.optim.AdamW, torch.bfloat16, {"state_bits": 8, "min_8bit_size": 64}),
    "4 bits": (memopt.optim.AdamW, torch.float32, {"state_bits": 4, "min_8bit_size": 64}),
    "stochastic": (memopt.optim.AdamW, torch.bfloat16, {"stochastic_rounding": True}),
    "master": (memopt.optim.AdamW, torch.bfloat16, {"master_weights": True}),
    "SGD": (memopt.optim.SGD, torch.float32, {"momentum": 0.9, "dampening": 0.5}),
}


def model_of(seed: int, dtype: torch.dtype = torch.float32, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))).to(dtype)


def loss_of(model: nn.Module, n: int) -> torch.Tensor:
    p = next(model.parameters())
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(n)).to(p.dtype)
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    optimizer.zero_grad()
    loss_of(model, n).backward()
    optimizer.step()


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    def evaluated() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, n)
        loss.backward()
        return loss

    assert optimizer.step(evaluated) > 0


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("way", [step, closure])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_has_the_bits_of_one_whose_steps_come_after(kind: str, way: Callable[..., None]) -> None:
    made, dtype, options = KINDS[kind]
    ends = []
    for at_once in (False, True):
        model = model_of(SEED, dtype)
        groups = [
            {"params": [*model[:2].parameters()]},
            {"params": [*model[2:].parameters()], "lr": 0.03, "weight_decay": 0.2},
        ]
        optimizer = made(groups, lr=0.01, step_in_backward=at_once, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        for n in range(6):
            way(model, optimizer, n)
            schedule.step()
            if n == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if n == 3:
                model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4, last_epoch=3)
        ends.append((model, optimizer.state_dict()))
    (plain, states), (other, others) = ends
    assert same(plain, other)
    for number, a in states["state"].items():
        b = others["state"][number]
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_gradient_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, there = model_of(0), []
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    update = OnePass._update

    def noted(self: OnePass, scaling: Any) -> None:
        there.append(sum(type(p.grad) is torch.Tensor for p in model.parameters()))
        update(self, scaling)

    monkeypatch.setattr(OnePass, "_update", noted)
    loss_of(model, 0).backward()
    assert there == [1] * 8
    assert optimizer.memory() == {"cpu": {"parameters": 4 * 4 * 17 * 16}}
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_whoever_needs_a_gradient_afterwards_is_told_and_nothing_more_is_stepped() -> None:
    model = model_of(0)
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    loss_of(model, 0).backward()
    assert repr(model[0].weight.grad) == "SteppedGradient((16, 16), torch.float32, device='cpu')"
    before = copy.deepcopy([*model.parameters()])
    said = "with which step_in_backward=True has stepped already"
    scaler = memopt.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for needs in (
        lambda: loss_of(model, 1).backward(),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: memopt.amp.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model[0].weight.grad + 1,
    ):
        with pytest.raises(RuntimeError, match=said):
            needs()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    loss_of(model, 1).backward()
    assert not torch.equal(model[0].weight, before[0])


def test_a_second_backward_pass_through_what_has_stepped_is_refused() -> None:
    model = model_of(0)
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_excludes_it_is_refused_before_anything_has_changed() -> None:
    model = model_of(0)
    with pytest.raises(ValueError, match="uses each gradient up .* leave out offload_gradients=True"):
        memopt.optim.AdamW(model.parameters(), step_in_backward=True, offload_gradients=True)
    optimizer = memopt.optim.SGD(model[0].parameters(), lr=0.1, step_in_backward=True)
    for option in ("step_in_backward", "offload_gradients"):
        with pytest.raises(
            ValueError, match=f"{option}=True: a parameter of shape .* is another optimizer's"
        ):
            memopt.optim.SGD(model.parameters(), lr=0.1, **{option: True})  # type: ignore[arg-type]
    before = copy.deepcopy([*model.parameters()])
    for exact in (None, False):
        with pytest.raises(ValueError, match="steps as its gradient is made .* could not be undone"):
            memopt.backward(lambda x: model(x).square().mean(), torch.ones(4, 16), model=model, exact=exact)
    assert all(map(torch.equal, model.parameters(), before))
    del optimizer
    loss_of(model, 0).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_gradients_that_the_hook_cannot_take_are_left_to_step() -> None:
    table, p = nn.Embedding(8, 4, sparse=True), nn.Parameter(torch.ones(4))
    optimizer = memopt.optim.SGD([table.weight, p], lr=1.0, step_in_backward=True)
    before = table.weight.detach().clone()
    (table(torch.tensor([1])) * p).sum().backward()
    assert table.weight.grad.is_sparse and torch.equal(table.weight, before)
    optimizer.step()
    assert not torch.equal(table.weight[1], before[1]) and torch.equal(table.weight[2], before[2])

    q = nn.Parameter(torch.ones(4))
    optimizer = memopt.optim.SGD([q], lr=0.5, step_in_backward=True)
    q.square().sum().backward(create_graph=True)
    assert type(q.grad) is torch.Tensor
    optimizer.step()
    assert torch.equal(q, torch.zeros(4))
    for wanted in (False, True):  # a group's option may change
        optimizer.param_groups[0]["step_in_backward"] = wanted
        optimizer.zero_grad()
        q.sum().backward()
        assert (type(q.grad) is SteppedGradient) == wanted
        optimizer.step()
    assert torch.equal(q, torch.full((4,), -1.0))


def test_a_step_that_fails_keeps_its_gradient_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(0)
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    before = copy.deepcopy([*model.parameters()])

    def failing(*_: object) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(OnePass, "_update", failing)
        with pytest.raises(ArithmeticError):
            loss_of(model, 0).backward()
    assert all(map(torch.equal, model.parameters(), before))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    optimizer.step()  # what is there
    assert sum(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)) == 1
    step(model, optimizer, 1)


def test_an_interrupted_step_is_taken_and_its_gradient_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = memopt.optim.SGD([p], lr=1.0, step_in_backward=True)
    update = OnePass._update

    def interrupted(self: OnePass, scaling: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        update(self, scaling)

    monkeypatch.setattr(OnePass, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        p.sum().backward()
    monkeypatch.undo()
    assert torch.equal(p, torch.zeros(4)) and type(p.grad) is SteppedGradient
    optimizer.step()
    assert torch.equal(p, torch.zeros(4))


def test_a_parameter_that_was_frozen_steps_in_the_backward_pass_once_it_is_not() -> None:
    model = model_of(0)
    model[0].requires_grad_(False)
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    step(model, optimizer, 0)
    model[0].requires_grad_(True)
    step(model, optimizer, 1)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    assert all(type(p.grad) is SteppedGradient for p in model.parameters())


def test_tied_parameters_step_once() -> None:
    ends = []
    for at_once in (False, True):
        model = model_of(0)
        model[3].weight = model[0].weight
        optimizer = memopt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, step_in_backward=at_once)
        for n in range(3):
            step(model, optimizer, n)
        ends.append(model)
    assert same(*ends)
